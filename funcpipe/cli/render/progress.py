"""Progress bars, on stderr."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from funcpipe.client.results import Progress as RunProgress


@contextlib.contextmanager
def profiling(*, quiet: bool = False) -> Iterator[Callable[[str, float], None]]:
    """Yields what to call with the name of a layer and the share of the work that is done."""
    columns = (TextColumn("profiling"), BarColumn(), TextColumn("{task.percentage:>3.0f}% {task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda name, share: bar.update(task, completed=share, description=name)


@contextlib.contextmanager
def training(*, quiet: bool) -> Iterator[Callable[["RunProgress"], None]]:
    """Yields what to call after each step."""
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.4f}  {task.fields[rate]:.0f} samples/s  ${task.fields[cost]:.6f}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as bar:
        task = bar.add_task("", total=None, loss=float("nan"), rate=0.0, cost=0.0)

        def on_progress(progress: "RunProgress") -> None:
            bar.update(
                task,
                total=progress.steps,
                completed=progress.step,
                loss=progress.loss,
                rate=progress.samples_per_s,
                cost=progress.cost_usd,
            )

        yield on_progress
