"""A run's progress: a bar in a terminal or a notebook, and log lines where there is neither."""

import logging
import time
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from funcpipe.client.follow import results
from funcpipe.client.follow.callbacks import Callback, RunInfo
from funcpipe.core.texts import number_text

_log = logging.getLogger(__name__)

EVERY_S = 30.0
"""Seconds between log lines where no bar can be drawn."""


class ProgressBar(Callback):
    """A line with the job's estimate, then a bar with step, loss, samples a second, dollars and the time that is left.

    Where there is neither a terminal nor a notebook, a line is logged every EVERY_S instead (level info, which needs
    logging to be set up).
    """

    def __init__(self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """A `console` of its own writes to stderr; in a notebook rich draws the bar below the cell."""
        self._console = console or _console()
        self._draws = self._console.is_terminal or self._console.is_jupyter
        self._clock = clock
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._values = ""
        self._logged_s = clock()

    def on_start(self, run: RunInfo) -> None:
        """Show what is expected."""
        line = f"{run.run}: {_expected(run)}"
        if not self._draws:
            _log.info("%s", line)
            return
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[status]}", markup=False),
            TimeRemainingColumn(elapsed_when_finished=True),
        )
        self._bar = Progress(*columns, console=self._console)
        self._task = self._bar.add_task("", total=run.steps, completed=run.done, status="starting")
        self._bar.start()

    def on_step(self, progress: results.Progress) -> None:
        """Draw a step, or log a line if it is time."""
        rate = f"  {progress.samples_per_s:.0f} samples/s" if progress.samples_per_s else ""
        status = f"loss {progress.loss:.4f}{rate}  ${number_text(progress.cost_usd, 6)}{self._values}"
        if self._bar is not None:
            self._bar.update(self._task, total=progress.steps, completed=progress.step, status=status)
        elif self._clock() - self._logged_s >= EVERY_S or progress.step == progress.steps:
            self._logged_s = self._clock()
            _log.info("step %d of %d: %s", progress.step, progress.steps, status)

    def on_validation(self, step: int, values: Mapping[str, float]) -> None:
        """Show the newest values beside the loss."""
        self._values = "".join(f"  {name} {value:.4f}" for name, value in values.items())

    def on_end(self, result: results.RunResult) -> None:
        """End the bar."""
        self._stop()

    def on_error(self, error: BaseException) -> None:
        """End the bar."""
        self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _console() -> Console:
    console = Console()
    return console if console.is_jupyter else Console(stderr=True)


def _expected(run: RunInfo) -> str:
    if run.estimate is None:
        return f"{run.steps - run.done} of {run.steps} steps, with no estimate in the plan"
    return run.estimate.line(run.max_usd)
