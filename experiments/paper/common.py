"""What the scripts of the paper's evaluation share: settings in, one result out, as JSON and as a figure.

A script is a module with a `SCRIPT`: its question, and a function from `Settings` to a `Result`. A result says whether
its numbers were executed or simulated, and on what; its findings are sentences made of its own numbers.
"""

import argparse
import io
import json
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from funcpipe.core import checks
from funcpipe.errors import InputError, InvalidValue

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODELS = ("resnet101", "amoebanet-d18", "amoebanet-d36", "bert-large")
BATCHES = (16, 64, 256)
TIME_VALUES = (0.0, 3.84, 30.72, 245.76)
"""Dollars that a saved hour is worth: the paper's weights 0, 2^16, 2^19 and 2^22 at Lambda's price of a GB-s."""
SPECS = ("aws-lambda", "aliyun-fc")
LOCAL = "local"

PAPER_SPEEDUP = (1.3, 2.2)
"""What the paper's abstract claims against other serverless frameworks: so many times as fast."""
PAPER_SAVING = (0.07, 0.77)
"""What the paper's abstract claims against them: costs so much lower."""
PAPER_CLAIM = "the paper's abstract claims 1.3x to 2.2x as fast, at 7 % to 77 % lower cost"

_INK = "#010203"  # stands for the page's own colour of text, light or dark

Row = Mapping[str, Any]


class How(Enum):
    """How the numbers of a result came about."""

    SIMULATED = "simulated"
    EXECUTED = "executed"
    BOTH = "simulated and executed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a script works with.

    Plans are made for `models`, `batches`, `time_values` (dollars an hour) and the specifications `specs`. What is
    executed runs for `steps` steps on `platform`: local functions with the limits of the specification `like`, or a
    deployment's URL. A deployment costs money, so that it needs `max_usd`, which each run there may cost.
    """

    models: tuple[str, ...] = MODELS
    batches: tuple[int, ...] = BATCHES
    time_values: tuple[float, ...] = TIME_VALUES
    specs: tuple[str, ...] = SPECS
    platform: str = LOCAL
    like: str | None = "aws-lambda"
    max_usd: float | None = None
    steps: int = 4
    execute: bool = True

    def __post_init__(self) -> None:
        for name in ("models", "batches", "time_values", "specs"):
            checks.filled(name, getattr(self, name))
        checks.whole("steps", self.steps, 2)
        if self.max_usd is not None:
            checks.positive("max_usd", self.max_usd)
        if self.platform != LOCAL and self.max_usd is None:
            raise InvalidValue(
                "max_usd", None, f"must say what a run on {self.platform} may cost: nothing is spent without --max-usd"
            )

    @property
    def place(self) -> str:
        """Where what is executed runs, in words."""
        if self.platform != LOCAL:
            return self.platform
        return "local functions" if self.like is None else f"local functions with the limits of {self.like}"


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a script has found: `rows` of numbers, `findings` made of them, and a `figure` that shows them."""

    how: How
    on: str
    rows: tuple[Row, ...]
    findings: tuple[str, ...]
    figure: "Figure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A question of the evaluation, and what answers it."""

    name: str
    question: str
    measure: Callable[[Settings], Result]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A script's result in the form that the index reads: the figure as SVG text, the seconds that it took."""

    name: str
    question: str
    how: str
    on: str
    findings: tuple[str, ...]
    rows: tuple[Row, ...]
    svg: str
    took_s: float


def answer(script: Script, settings: Settings) -> Answer:
    """Run a script."""
    began_s = time.monotonic()
    result = script.measure(settings)
    return Answer(
        name=script.name,
        question=script.question,
        how=result.how.value,
        on=result.on,
        findings=result.findings,
        rows=result.rows,
        svg=svg_text(result.figure, script.name),
        took_s=time.monotonic() - began_s,
    )


def save(found: Answer, folder: Path) -> None:
    """Write an answer as NAME.json, and its figure as NAME.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = asdict(found)
    (folder / f"{found.name}.svg").write_text(plain.pop("svg"), encoding="utf-8")
    (folder / f"{found.name}.json").write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")


def load(folder: Path, name: str) -> Answer:
    """Read what `save` wrote."""
    plain = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    svg = (folder / f"{name}.svg").read_text(encoding="utf-8")
    plain |= {"findings": tuple(plain["findings"]), "rows": tuple(plain["rows"])}
    return Answer(**plain, svg=svg)


def run(script: Script) -> None:
    """Be the command of one script."""
    parser = argparse.ArgumentParser(description=script.question)
    folder, settings = read_arguments(parser)
    found = answer(script, settings)
    save(found, folder)
    tell(found)


def tell(found: Answer) -> None:
    """Print what was found."""
    print(f"{found.question}  [{found.how}: {found.on}; {found.took_s:.0f} s]")
    for sentence in found.findings:
        print(f"  - {sentence}")


def read_arguments(parser: argparse.ArgumentParser, words: Sequence[str] | None = None) -> tuple[Path, Settings]:
    """The folder to write to, and the settings; ends the process with exit code 2 if they make no sense."""
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS, metavar="MODEL")
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES), metavar="N")
    parser.add_argument("--time-values", nargs="+", type=float, default=list(TIME_VALUES), metavar="USD_PER_HOUR")
    parser.add_argument("--specs", nargs="+", default=list(SPECS), metavar="NAME|FILE", help="platforms to plan for")
    parser.add_argument("--platform", default=LOCAL, metavar="URL", help="where to run: local, or aws-lambda://…, …")
    parser.add_argument("--like", default="aws-lambda", metavar="NAME|FILE", help="limits of local functions; or none")
    parser.add_argument("--max-usd", type=float, help="what one run on a deployment may cost; without it none starts")
    parser.add_argument("--steps", type=int, default=4, help="of each run")
    parser.add_argument("--no-execute", action="store_true", help="only simulate")
    parser.add_argument("--output", type=Path, default=Path("out/experiments"), metavar="FOLDER")
    found = parser.parse_args(words)
    warnings.filterwarnings("ignore", "functions with more vCPUs")
    try:
        return found.output, Settings(
            models=tuple(found.models),
            batches=tuple(found.batches),
            time_values=tuple(found.time_values),
            specs=tuple(found.specs),
            platform=found.platform,
            like=None if found.like == "none" else found.like,
            max_usd=found.max_usd,
            steps=found.steps,
            execute=not found.no_execute,
        )
    except InputError as error:
        parser.error(str(error))


def new_figure(columns: int, rows: int = 1, *, width: float = 3.4, height: float = 3.0) -> "Figure":
    """A figure with room for so many axes, drawn in the page's own colour of text."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    ink: Any = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK)
    quiet: Any = {"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "font.size": 8}
    mpl.rcParams.update({**ink, **quiet, "svg.fonttype": "none", "axes.facecolor": "none"})
    return Figure(figsize=(width * columns, height * rows), layout="constrained", facecolor="none")


def svg_text(figure: "Figure", name: str) -> str:
    """The figure as SVG whose text has the colour of the page around it."""
    import matplotlib as mpl

    with mpl.rc_context({"svg.hashsalt": name}), io.StringIO() as text:
        figure.savefig(text, format="svg", metadata={"Date": None})
        drawn = text.getvalue()
    return drawn[drawn.index("<svg") :].replace(_INK, "currentColor")


def span(values: Iterable[float], form: str = "{:.2f}") -> str:
    """The least and the greatest of some values, and their median, in words."""
    found = sorted(values)
    if not found:
        return "none"
    low, middle, high = (form.format(value) for value in (found[0], median(found), found[-1]))
    return f"{low} to {high} (median {middle})"


def times(values: Iterable[float]) -> str:
    """Speed-ups in words."""
    return span(values, "{:.2f}x")


def percent(values: Iterable[float]) -> str:
    """Shares in words."""
    return span([100 * value for value in values], "{:.1f} %")
