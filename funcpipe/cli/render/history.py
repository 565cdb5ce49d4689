"""What earlier runs took, in a terminal: beside a prediction, and all that is known."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from funcpipe.cli.render.table import Column, print_table

if TYPE_CHECKING:
    from funcpipe.history.learned import Known, ObservedIteration


def observed_lines(found: "Sequence[ObservedIteration]", prefix: str = "") -> list[str]:
    """An iteration as modelled, and as observed wherever its platform's plans have run; no lines without history."""
    if not found:
        return []
    first = found[0]
    lines = [f"{prefix}as modelled: an iteration takes {first.modelled_s:.3f} s, ${first.modelled_usd:.6f}"]
    lines += [
        f"{prefix}as observed here, on {one.ran_on}: {one.observed_s:.3f} s, ${one.observed_usd:.6f} "
        f"(x {one.factor:.2f}, by {one.runs} {'run' if one.runs == 1 else 'runs'}"
        f"{'' if one.same_sizes else ' with functions of other sizes'})"
        for one in found
    ]
    return lines


def observed(found: "Sequence[ObservedIteration]", console: Console, prefix: str = "") -> None:
    """These lines."""
    for line in observed_lines(found, prefix):
        console.print(line, soft_wrap=True)


def history(found: "Sequence[Known]", path: Path | None, console: Console) -> None:
    """All that is known, a line for each quantity of a size."""
    if path is None:
        console.print("the history is turned off: FUNCPIPE_HISTORY is empty")
        return
    if not found:
        told = f"nothing is known yet: {path} has no observations; runs of plans with an estimate are filed there"
        console.print(told, soft_wrap=True)
        return
    columns = (
        *(Column("platform", text=True, drop=1), Column("ran on", text=True), Column("size", text=True)),
        *(Column("what", text=True), Column("runs"), Column("factor"), Column("offset s", drop=2)),
        *(Column("error before"), Column("error after")),
    )
    rows = [
        (
            one.platform,
            one.ran_on,
            one.size,
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


def _percent(error: float | None) -> str:
    return "-" if error is None else f"{error:.0%}"
