"""The verb history, and what other verbs add to their predictions: what is observed here."""

import argparse
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from funcpipe.cli import render
from funcpipe.cli.files import write_file
from funcpipe.core import Plan
from funcpipe.core.json_form import to_plain
from funcpipe.history.journal import history_file, read_history
from funcpipe.history.learned import ObservedIteration, as_observed, errors, known


def history(options: argparse.Namespace) -> None:
    """Print what is known, and how far predictions were off before and after correction."""
    path = history_file()
    observations = read_history(path) if path is not None else ()
    found = known(observations)
    if options.figure:
        from funcpipe.history.plot import plot_errors

        write_file(partial(plot_errors, errors(observations)), options.figure)
    summary = {"history": None if path is None else str(path), "known": found}
    render.show(options.json, render.as_json(summary), partial(render.history, found, path))


def observed_here(plans: Sequence[Plan]) -> tuple[tuple[ObservedIteration, ...], ...]:
    """Of each plan, what an iteration takes wherever plans for its platform have run."""
    observations = read_history()
    return tuple(as_observed(plan, observations) for plan in plans)


def with_observed(document: str, observed: Any) -> str:
    """The JSON of a prediction, with what is `observed` beside it; as it is where nothing was."""
    return render.as_json(json.loads(document) | {"observed_here": to_plain(observed)}) if observed else document
