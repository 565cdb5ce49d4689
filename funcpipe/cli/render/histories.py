"""Earlier runs in a terminal: beside a prediction, and all that is known."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from funcpipe.cli.render.table import Column, print_table
from funcpipe.core.texts import number_text, time_text, usd_text

if TYPE_CHECKING:
    from funcpipe.neighbours.history.hindsight import Hindsight
    from funcpipe.neighbours.history.learned import Known, ObservedIteration


def observed_lines(found: "Sequence[ObservedIteration]", prefix: str = "") -> list[str]:
    """An iteration as modelled, and as observed wherever its platform's plans have run; no lines without history."""
    if not found:
        return []
    first = found[0]
    lines = [f"{prefix}as modelled: an iteration takes {_iteration(first.modelled_s, first.modelled_usd)}"]
    lines += [
        f"{prefix}as observed here, on {one.ran_on}: {_iteration(one.observed_s, one.observed_usd)} "
        f"(x {one.factor:.2f}, by {one.runs} {'run' if one.runs == 1 else 'runs'}"
        f"{'' if one.same_sizes else ' with functions of other sizes'})"
        for one in found
    ]
    return lines


def _iteration(seconds: float, usd: float) -> str:
    return f"{number_text(seconds, 3)} s, ${number_text(usd, 6)}"


def observed(found: "Sequence[ObservedIteration]", console: Console, prefix: str = "") -> None:
    """Print the lines of `observed_lines`."""
    for line in observed_lines(found, prefix):
        console.print(line, soft_wrap=True)


def history(found: "Sequence[Known]", path: Path | None, console: Console) -> None:
    """All that is known, a line for each quantity of a size."""
    if path is None:
        console.print("the history is turned off: FUNCPIPE_HISTORY is empty")
        return
    if not found:
        text = f"nothing is known yet: {path} has no observations; runs of plans with an estimate are filed there"
        console.print(text, soft_wrap=True)
        return
    columns = (
        *(Column("platform", text=True, drop=1), Column("ran on", text=True), Column("size", text=True)),
        *(Column("model", text=True, drop=3), Column("what", text=True), Column("runs"), Column("factor")),
        Column("offset s", drop=2),
        *(Column("error before"), Column("error after")),
    )
    rows = [
        (
            one.platform,
            one.ran_on,
            one.size,
            one.model or "-",
            one.quantity.value,
            str(one.runs),
            f"{one.factor:.2f}" if not one.offset_s else "-",
            f"{one.offset_s:+.2f}" if one.offset_s else "-",
            _percent(one.error_before),
            _percent(one.error_after),
        )
        for one in found
    ]
    print_table(console, "predicted and observed", columns, rows)
    console.print(f"errors are medians, of runs after the first; from {path}", soft_wrap=True)


def hindsight(found: "Sequence[Hindsight]", console: Console) -> None:
    """The chosen ways in hindsight: a line for each job that was done by one of the ways compared for it."""
    if not found:
        return
    counted = [one for one in found if one.counts]
    columns = (
        *(Column("compared", text=True, drop=1), Column("job", text=True), Column("chosen way", text=True)),
        *(Column("predicted"), Column("observed"), Column("best in hindsight", text=True)),
    )
    rows = [
        (
            time.strftime("%Y-%m-%d", time.localtime(one.comparison.at_s)),
            f"{one.comparison.model}, {one.comparison.job.goal}",
            one.chosen.way,
            _price(one.chosen.seconds, one.chosen.usd),
            _price(one.observed.seconds, one.observed.usd),
            _best(one),
        )
        for one in found
    ]
    print_table(console, "", [*columns], rows)
    best = sum(one.is_best for one in counted)
    console.print(f"chosen way best in hindsight: {best} of {jobs(len(counted))}")
    others = [known for one in counted for known in one.known if known.way != one.chosen.way]
    modelled = sum(known.basis == "modelled" for known in others)
    if others:
        console.print(
            f"of {len(others)} predictions of other ways, {modelled} are as modelled, as no run of them is known here"
        )
    if len(counted) < len(found):
        console.print("runs that were not where the way was predicted for do not count")


def jobs(number: int) -> str:
    """A number of jobs."""
    return f"{number} job" if number == 1 else f"{number} jobs"


def _best(one: "Hindsight") -> str:
    if not one.counts:
        return f"not counted: it ran on {one.run.ran_on}"
    if one.is_best:
        return "the chosen one"
    if one.best is None:
        return "none would do the job"
    (known,) = [known for known in one.known if known.way == one.best]
    return f"{known.way}: {_price(known.seconds, known.usd)}, {'as ' if known.basis == 'modelled' else ''}{known.basis}"


def _price(seconds: float, usd: float) -> str:
    return f"{time_text(seconds) if seconds >= 10 else f'{seconds:.2g} s'}, ${usd_text(usd)}"


def _percent(error: float | None) -> str:
    return "-" if error is None else f"{error:.0%}"
