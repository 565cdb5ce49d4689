"""Progress bars, on stderr."""

import contextlib
from collections.abc import Callable, Iterator

from rich.progress import BarColumn, Progress, TextColumn

from funcpipe.cli.render.terminal import Terminal


@contextlib.contextmanager
def profiling(*, quiet: bool = False) -> Iterator[Callable[[str, float], None]]:
    """Yield a callback for the name of a layer and the share of the work that is done."""
    columns = (TextColumn("profiling"), BarColumn(), TextColumn("{task.percentage:>3.0f}% {task.description}"))
    with Progress(*columns, console=Terminal(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda name, share: bar.update(task, completed=share, description=name)
