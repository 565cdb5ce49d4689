"""A run while it goes on, in a terminal: one screen for each poll, or lines where there is no terminal."""

import itertools
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.text import Text

from funcpipe.core import MB
from funcpipe.core.texts import time_text, usd_text
from funcpipe.show.runs import doing

if TYPE_CHECKING:
    from funcpipe.client.control.status import WorkerStatus
    from funcpipe.client.control.watching import RunView, StepLoss

_BLOCKS = "▁▂▃▄▅▆▇█"
_STYLES = {"running": "green", "finished": "green", "waiting": "yellow", "stopped": "yellow"}
_LANES = {"compute": "cpu", "upload": "up", "download": "down"}
_FEW_BEATS = 3
_SUCCESSIONS = 4
_ROOM_FOR_NOTE = 6
_WELL = ("working", "starting", "finished", "halted")
_NUMBER = re.compile(r"\b\d+(?:\.\d+)?(?= s\b|%| times)")
"""Numbers that change from poll to poll, while a warning stays the same."""


def screen(
    view: "RunView", console: Console, *, every_s: float | None = None, all_rows: bool = False
) -> RenderableType:
    """One view, cut to the console's size unless `all_rows`; `every_s` is the pause until the next one, if any."""
    width = console.width
    head = _wrapped([*_head(view, width), Text("")], console)
    tail = _wrapped([*_successions(view, 10**6 if all_rows else _SUCCESSIONS), *_warnings(view)], console)
    foot = [] if every_s is None else [Text(""), _foot(view, every_s)]
    if all_rows:
        return Group(*head, *_workers(view, 10**6), *tail, *foot)
    room = max(console.height - len(head) - len(tail) - len(foot) - 1, 3)
    lines = [*head, *_workers(view, room), *tail, *foot][: console.height - 1]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Group(*lines)


def _wrapped(lines: Iterable[Text], console: Console) -> list[Text]:
    return [part for line in lines for part in line.wrap(console, console.width) or [line]]


class PollLog:
    """The lines that each poll adds, where no screen can be drawn. A warning that only counts on is not repeated."""

    def __init__(self) -> None:
        self._printed: set[str] = set()

    def of(self, view: "RunView") -> list[str]:
        """One line that sums up the view, and what is new: functions that took over, and warnings."""
        news = [line.plain for line in (*_successions(view, 10**6)[1:], *_warnings(view)[1:])]
        new = [line for line in news if _NUMBER.sub("", line.strip()) not in self._printed]
        self._printed |= {_NUMBER.sub("", line.strip()) for line in news}
        status = view.status
        parts = [f"{_clock(view.looked_at_s)} {status.verdict.value}: step {view.done} of {status.steps}"]
        parts += [f"loss {view.losses[-1].loss:.4f}"] if view.losses else []
        parts += [_pace(view), _dollars(view)]
        return [", ".join(part for part in parts if part), *new]


def sparkline(values: Sequence[float], width: int) -> str:
    """`values` as blocks of eight heights, the newest last; each block is the mean of as many values. NaN is a gap."""
    groups = min(width, len(values))
    if groups < 1:
        return ""
    bounds = [i * len(values) // groups for i in range(groups + 1)]
    means = [sum(values[first:stop]) / (stop - first) for first, stop in itertools.pairwise(bounds)]
    finite = [mean for mean in means if abs(mean) < float("inf")]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    half = high / 2 - low / 2 or 1.0  # the difference of two large numbers may overflow, that of their halves cannot
    shares = [(mean / 2 - low / 2) / half if abs(mean) < float("inf") else None for mean in means]
    return "".join(" " if share is None else _BLOCKS[round((len(_BLOCKS) - 1) * share)] for share in shares)


def _head(view: "RunView", width: int) -> Iterator[Text]:
    status = view.status
    title = Text(f"run {status.run}  ", style="bold")
    title.append(status.verdict.value, style=_STYLES.get(status.verdict.value, "bold red"))
    yield title.append(f": {status.explanation}", style="not bold")
    bar = max(min(width - 54, 40), 10)
    full = round(bar * view.done / status.steps) if status.steps else bar
    progress = Text(f"step {view.done} of {status.steps}  ")
    yield progress.append("█" * full, "green").append("░" * (bar - full), "dim").append(f"  {_pace(view)}")
    if view.losses:
        yield _losses(view, width)
    if status.validation is not None:
        values = ", ".join(f"{name} {value:.4f}" for name, value in status.validation.values.items())
        best = f"; best after step {status.validation.best_step}" if status.validation.best_step is not None else ""
        yield Text(f"validated after step {status.validation.step}: {values}{best}")
    yield Text(f"{_dollars(view)}, {time_text(status.run_s)} so far; step {status.saved_step} is saved")
    if view.planned_s is not None and view.planned_usd is not None:
        yield Text(f"the plan expected {view.planned_s:.3g} s a step, ${usd_text(view.planned_usd)} for all", "dim")


def _losses(view: "RunView", width: int) -> Text:
    last, first = view.losses[-1], view.first_loss or view.losses[0]
    lowest: StepLoss = min(view.losses, key=lambda found: found.loss)
    text = Text(f"loss {last.loss:.4f}  ")
    text.append(sparkline([found.loss for found in view.losses], max(min(width - 56, 60), 8)), "cyan")
    return text.append(f"  {first.loss:.4f} in step {first.step + 1}, lowest {lowest.loss:.4f}")


def _pace(view: "RunView") -> str:
    if view.step_s is None or view.left_s is None:
        return ""
    pace = f"{1 / view.step_s:.2f} steps/s" if view.step_s < 2 else f"{view.step_s:.1f} s a step"
    return f"{pace}, {time_text(view.left_s)} left"


def _dollars(view: "RunView") -> str:
    expected = "" if view.expected_usd is None else f" of about ${usd_text(view.expected_usd)}"
    return f"${usd_text(view.status.run_usd)}{expected}"


def _workers(view: "RunView", room: int) -> Iterator[Text]:
    """A line for each worker, those first that need attention where `room` is not enough for all."""
    most = max(view.beats.values(), default=0)
    lanes = "".join(f"{name:>5}" for name in _LANES.values()) if most >= _FEW_BEATS else ""
    note = bool(lanes) and room > _ROOM_FOR_NOTE
    yield Text(f"{'worker':<8}{'try':>4}{'step':>7}{'memory MB':>15}{lanes}  doing", style="bold")
    chosen = workers = view.status.workers
    if len(workers) > room - 1 - note:
        chosen = tuple(sorted(workers, key=lambda worker: worker.state.value in _WELL)[: room - 2 - note])
    for worker in chosen:
        memory = f"{worker.memory_bytes / MB:.0f} of {worker.memory_mb}"
        line = Text(f"{worker.worker:<8}{worker.attempt:>4}{worker.step:>7}{memory:>15}")
        if lanes:
            line.append("".join(f"{_share(view, worker, lane):>5}" for lane in _LANES), "cyan")
        yield line.append(f"  {_brief(worker)}", _style_of(worker))
    if len(chosen) < len(workers):
        yield Text(f"… and {len(workers) - len(chosen)} more workers (--once shows all)", style="dim")
    if note:
        yield Text(f"cpu, up, down: share of {most} heartbeats with a task on the lane, waiting included", style="dim")


def _brief(worker: "WorkerStatus") -> str:
    """The state of a worker in few words: the tasks of its lanes, or the worker it waits for."""
    if worker.outcome is not None or not worker.busy:
        return " ".join(doing(worker).split())
    own = f".{worker.worker}."
    parts = [
        f"waits for {'.'.join(busy.awaits.split('.')[1:3])}" if busy.awaits else busy.task.replace(own, " ")
        for busy in sorted(worker.busy, key=lambda busy: busy.awaits is not None)
    ]
    return ", ".join(dict.fromkeys(parts))


def _share(view: "RunView", worker: "WorkerStatus", lane: str) -> str:
    if view.beats.get(worker.worker, 0) < _FEW_BEATS:
        return "-"
    return f"{view.lane_shares.get(worker.worker, {}).get(lane, 0.0):.0%}"


def _style_of(worker: "WorkerStatus") -> str:
    return {"working": "", "finished": "green", "starting": "dim"}.get(worker.state.value, "red")


def _successions(view: "RunView", most: int) -> list[Text]:
    found = view.successions
    if not found:
        return []
    chosen = found[-most:]
    title = f"restarts and hand-overs: {len(found)}" + (f", the last {most}" if len(chosen) < len(found) else "")
    return [
        Text(title, style="bold"),
        *(
            Text(f"  {_clock(one.started_at_s)} {one.worker} attempt {one.attempt}, {one.reason}", style="yellow")
            for one in chosen
        ),
    ]


def _warnings(view: "RunView") -> list[Text]:
    if not view.warnings:
        return []
    return [Text("warnings", style="bold"), *(Text(f"  ! {warning}", style="red") for warning in view.warnings)]


def _foot(view: "RunView", every_s: float) -> Text:
    asked = view.asked
    requests = asked.lists + asked.gets
    polled = f"looked at {_clock(view.looked_at_s)} with {requests} requests, again in {every_s:g} s"
    return Text(f"q leaves the run as it is; {polled}", style="dim")


def _clock(at_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at_s))
