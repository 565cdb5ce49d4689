"""The verb history, and the observations that other verbs add to their predictions."""

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from funcpipe import show as render
from funcpipe.cli.files import write_file
from funcpipe.core import Plan
from funcpipe.core.json_form import OBSERVED, to_plain
from funcpipe.neighbours.history.journal import History, history_file, read_all, read_history
from funcpipe.neighbours.history.learned import Known, ObservedIteration, as_observed, errors, known

if TYPE_CHECKING:
    from rich.console import Console

    from funcpipe.neighbours.history.hindsight import Hindsight


def history(options: argparse.Namespace) -> None:
    """Print what is known, and how far predictions were off before and after correction."""
    path = history_file()
    everything = read_all(path) if path is not None else History()
    found = known(everything.observations)
    from funcpipe.neighbours.history.hindsight import hindsights

    in_hindsight = hindsights(everything)
    if options.figure:
        from funcpipe.neighbours.history.plot import plot_errors

        write_file(partial(plot_errors, errors(everything.observations)), options.figure)
    counted = [one for one in in_hindsight if one.counts]
    best = {"jobs": len(counted), "best": sum(one.is_best for one in counted)}
    summary: dict[str, Any] = {"history": None if path is None else str(path), "known": found}
    summary |= {"chosen_way_best_in_hindsight": best, "hindsight": in_hindsight}
    render.show(options.json, render.as_json(summary), partial(_history, found, in_hindsight, path))


def _history(
    found: "Sequence[Known]", in_hindsight: "Sequence[Hindsight]", path: Path | None, console: "Console"
) -> None:
    render.history(found, path, console)
    render.hindsight(in_hindsight, console)


def observed_here(plans: Sequence[Plan], ran_on: str | None = None) -> tuple[tuple[ObservedIteration, ...], ...]:
    """For each plan, an iteration as observed of like work at its platform, or at `ran_on`; left out without any."""
    observations = read_history()
    found = (as_observed(plan, observations, ran_on=ran_on) for plan in plans)
    return tuple(() if one is None else (one,) for one in found)


def with_observed(document: str, observed: Any) -> str:
    """The JSON of a prediction, with what is `observed` beside it; as it is where nothing was."""
    return render.as_json(json.loads(document) | {OBSERVED: to_plain(observed)}) if observed else document
