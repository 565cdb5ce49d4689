"""The demo's last screen: what a person wants to know of a run, on 80 columns and 40 lines."""

import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from funcpipe.analysis.compare import Report, StageUse
from funcpipe.core import JobEstimate, Plan, Resource, Use
from funcpipe.core.texts import counted, time_text, usd_text
from funcpipe.core.trace import IN_STEPS
from funcpipe.examples import spirals
from funcpipe.training.verify import Verification, Yardstick

WIDTH, HEIGHT = 80, 40
_INDENT = 22

_JOB_FILE = """\
[model]
factory = "my_model:model"
sample = "my_model:sample"
micro-batch = 16

[data]
train = "my_model:train_data"

[platform]
name = "local"

[plan]
global-batch = 64
time-value = 3.84

[training]
optimizer = "my_model:optimizer"
epochs = 5
output = "trained.safetensors"
"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the demo has found; `trained_s` is what training took in all, `said` is the accuracy in words.

    `uses` is what the time of all functions went to, and `functions` how many those were.
    """

    name: str
    checked: Verification
    comparison: Report
    losses: Sequence[float]
    trained_s: float
    uses: Sequence[StageUse]
    functions: int
    cost_usd: float
    said: str
    why: Sequence[str]
    clouds: Sequence[tuple[str, Plan, JobEstimate]]
    report: Path
    yours: Path


def screen(found: Outcome) -> list[str]:
    """All lines of it."""
    lines = [f" {found.name}: what you have just seen ".center(WIDTH, "─"), ""]
    lines += _item("Equal to one process", [equality(found.checked)])
    trained = f"{counted(len(found.losses), 'step')} in {found.trained_s:.1f} s for ${usd_text(found.cost_usd)}"
    lines += _item("Trained", [f"{trained}: loss {found.losses[0]:.3f} -> {found.losses[-1]:.3f}; {found.said}"])
    lines += _item("Where the time went", [*time_spent(found), " ".join(found.why)])
    lines += _item("The same job on", cloud_lines(found.clouds))
    lines += _item("Report", [f"{found.report}, with traces beside it"])
    lines += ["", f"Your own model: edit {found.yours}/my_model.py, or try it as it is, and paste"]
    return [*lines, *(f"  {command}" for command in try_commands(found.yours)), "─" * WIDTH]


def equality(checked: Verification) -> str:
    """Whether functions have trained what one process would have, and how far off the worst number is."""
    exact = [tensor for tensor in checked.tensors if tensor.yardstick is Yardstick.TOLERANCE]
    rounded = len(checked.tensors) - len(exact)
    after = f"after {counted(checked.steps, 'step')}"
    if (off := checked.first_difference) is not None:
        return f"NO: {after}, {off.name} is off by {off.difference:.1e} of what training changed in it"
    worst = max((tensor.difference for tensor in exact), default=0.0)
    return (
        f"yes: {after}, all {len(checked.tensors)} tensors agree. The worst differs by {worst:.1e} of what training "
        f"changed in it ({checked.tolerance:.0e} is allowed)"
        + (f"; {rounded} by more, as rounding alone does in one process" if rounded else "")
    )


def time_spent(found: Outcome) -> Iterator[str]:
    """How long steps took and what the functions did meanwhile, by stages, and what was around the steps."""
    report, step_s = found.comparison, found.comparison.observed_iteration_s
    steps = len(found.losses)
    each = {use: sum(stage.seconds[use] for stage in found.uses) / found.functions for use in Use}
    steps_s, lived_s = sum(each[use] for use in IN_STEPS), sum(each.values())
    yield (
        f"of a function's {lived_s:.1f} s, its start took {each[Use.START]:.1f} s, {counted(steps, 'step')} "
        f"{steps_s:.1f} s, saving and ending {each[Use.SAVE]:.1f} s. A step took {step_s:.3f} s (predicted "
        f"{report.predicted_iteration_s:.3f} s); of it"
    )
    for stage in sorted({lane.stage for lane in report.lanes}):
        own = {lane.lane: lane.observed for lane in report.lanes if lane.stage == stage}
        computing = own[Resource.COMPUTE].busy_s / step_s
        parts = [f"{name} {own[lane].busy_s / step_s:.0%}" for lane, name in _BESIDE.items() if lane in own]
        beside = f", {', '.join(parts)}" if parts else ""
        yield f"stage {stage} computes {computing:.0%}, waits {max(1 - computing, 0):.0%}{beside}"


_BESIDE = {Resource.UPLOAD: "sends", Resource.DOWNLOAD: "receives"}


def cloud_lines(clouds: Iterable[tuple[str, Plan, JobEstimate]]) -> Iterator[str]:
    """An estimate for each cloud, and what it rests on."""
    for cloud, plan, estimate in clouds:
        sizes = "/".join(dict.fromkeys(stage.size for stage in plan.stages))
        functions = f"{counted(plan.workers, 'function')} ({sizes})"
        yield f"{cloud}: {time_text(estimate.seconds)}, ${usd_text(estimate.cost_usd)}, {functions}"
    yield (
        "These are estimates: this machine's times, scaled by vCPUs, with built-in sizes and prices. "
        f"Starting the functions is {_starts(clouds)} of it."
    )


def _starts(clouds: Iterable[tuple[str, Plan, JobEstimate]]) -> str:
    return " and ".join(f"{estimate.start.seconds:.0f} s" for _, _, estimate in clouds)


def write_own(folder: Path) -> Path:
    """A folder with a model of one's own, to be edited, and a job file, so that no command needs an option."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(str(spirals.__file__), folder / "my_model.py")
    (folder / "funcpipe.toml").write_text(_JOB_FILE)
    return folder


def try_commands(yours: Path) -> tuple[str, str, str]:
    """The three lines that profile, plan and train the model in the folder `yours`."""
    folder = Path(sys.executable).parent.absolute()
    inside = folder.is_relative_to(Path.cwd())
    path = f"$PWD/{folder.relative_to(Path.cwd())}" if inside else str(folder)
    return f"export PATH={path}:$PATH && cd {yours}", "funcpipe profile && funcpipe optimize", "funcpipe train"


def _item(title: str, lines: Iterable[str]) -> list[str]:
    wrapped = [part for line in lines for part in textwrap.wrap(line, WIDTH - _INDENT, break_on_hyphens=False)]
    return [f"{title if i == 0 else '':<{_INDENT}}{line}" for i, line in enumerate(wrapped)]
