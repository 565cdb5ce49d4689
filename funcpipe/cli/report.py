"""The verbs report and history: plans and runs as pages and side by side, and what runs have taught.

Other verbs add to their predictions what has been observed here.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from funcpipe import show
from funcpipe.cli.files import write_file
from funcpipe.cli.options import argument, group, option
from funcpipe.cli.verbs import Options, verb
from funcpipe.core import Plan, Source, Trace, read_trace, to_text, write_side_by_side
from funcpipe.core.json_form import OBSERVED, to_plain
from funcpipe.errors import InputError
from funcpipe.platforms.catalog import load_spec, names_spec, open_storage

if TYPE_CHECKING:
    from funcpipe.neighbours.history.learned import ObservedIteration
    from funcpipe.show.material import Material


@verb(
    "funcpipe report observed.json predicted.json plan.json profile.json -o report.html\n"
    "  funcpipe report RUN --storage file:///tmp/runs -o report.html\n"
    "  funcpipe report observed.json predicted.json\n"
    "  funcpipe report plan.json other.json",
    argument(
        "RUN|FILES ...",
        "traces, plans, a profile, a platform by name or file; with --storage, first the name of a run",
        "files",
        reads=True,
    ),
    option("--storage URL", "where the run keeps its objects"),
    group(
        "output",
        option("-o --output FILE", "write an HTML page (needs the extra `report`)", writes=""),
        option("--figure FILE", "draw a run and its prediction over time (needs matplotlib)", writes=""),
        option(
            "--perfetto FILE",
            "write a run and its prediction, one below the other, for https://ui.perfetto.dev",
            writes="",
        ),
    ),
    about="Show a plan or a run as a page; or, without -o, compare a run with its prediction, or show plans or runs "
    "side by side.",
)
def report(options: Options) -> None:
    """Write a page about a plan or a run, or show files side by side."""
    if options.output is None:
        _in_text(options)
        return
    from funcpipe.show.page import write_page

    if options.figure or options.perfetto:
        raise InputError("--figure and --perfetto belong to the comparison in text: leave them out, or leave out -o")
    write_file(partial(write_page, _material(options)), options.output)
    show.show(
        options.json,
        show.as_json({"report": options.output}),
        lambda: f"report written to {options.output}: open it in a browser",
    )


def _material(options: Options) -> "Material":
    """All that the command names, with the platform for which the plan was made."""
    from funcpipe.show.material import Material, merged, read_material

    first, words = Material(), list(options.files)
    run = [words.pop(0)] if options.storage is not None else []
    names = [word for word in words if names_spec(word)]
    if len(names) > 1:
        raise InputError(f"the platform is given twice: {' and '.join(names)}; name one")
    named = load_spec(names[0]) if names else None
    if run:
        from funcpipe.show.material import load_kept

        first = load_kept(open_storage(options.storage), run[0], named)
    given = read_material([word for word in words if word not in names])
    if named is not None and given.spec is not None:
        raise InputError(f"the platform is given twice: leave out {names[0]}, or the file")
    if given.profile is None and given.plan is not None and given.plan.request is not None:
        made_from = given.plan.request
        given = replace(given, profile=made_from.profile, spec=given.spec or made_from.spec)
    material = merged(first, given)
    spec = named or material.spec
    if spec is None and material.profile is not None:
        spec = load_spec(material.profile.platform)
    return replace(material, spec=spec)


def _in_text(options: Options) -> None:
    """Compare a run with its prediction, or show files side by side."""
    from funcpipe.show.side_by_side import side_by_side

    if len(options.files) < 2 or options.storage is not None:
        raise InputError("say what to make: -o report.html for a page, or name two files or more to compare")
    if traces := _run_and_prediction(options.files):
        _compare(options, *traces)
        return
    if options.figure or options.perfetto:
        raise InputError("--figure and --perfetto show a run and its prediction: name one trace of each")
    found = side_by_side(options.files)
    show.show(options.json, show.as_json(found.plain()), partial(show.beside, found))


def _run_and_prediction(files: Sequence[str]) -> tuple[str, Trace, Trace] | None:
    """The file with the trace of a run, that trace, and the predicted one, if `files` are these two, in any order."""
    from funcpipe.core.trace import TRACE_FORMAT
    from funcpipe.show.material import document_format

    if len(files) != 2 or any(document_format(path) != TRACE_FORMAT for path in files):
        return None
    by_source = {trace.source: (path, trace) for path, trace in ((path, read_trace(path)) for path in files)}
    if by_source.keys() != {Source.EXECUTED, Source.SIMULATED}:
        return None
    return (*by_source[Source.EXECUTED], by_source[Source.SIMULATED][1])


def _compare(options: Options, seen: str, observed: Trace, predicted: Trace) -> None:
    """Compare an observed run with its prediction."""
    from funcpipe.analysis.compare import compare as compare_traces
    from funcpipe.analysis.compare import typical_step
    from funcpipe.show.timeline import draw

    comparison = compare_traces(predicted, observed)
    step = typical_step(observed)
    if options.figure:
        write_file(partial(draw, predicted, step), options.figure)
    if options.perfetto:
        write_file(partial(write_side_by_side, predicted, step), options.perfetto)
    show.show(options.json, to_text(comparison), partial(show.comparison, comparison, seen))


@verb(
    "funcpipe history\n  FUNCPIPE_HISTORY=other.jsonl funcpipe history --json",
    option("--figure FILE", "draw the errors of predictions, run after run, into FILE", writes=""),
)
def history(options: Options) -> None:
    """Print what is known, and how far predictions were off before and after correction."""
    from funcpipe.neighbours.history.hindsight import hindsights
    from funcpipe.neighbours.history.journal import History, history_file, read_all
    from funcpipe.neighbours.history.learned import errors, known

    path = history_file()
    everything = read_all(path) if path is not None else History()
    found, in_hindsight = known(everything.observations), hindsights(everything)
    if options.figure:
        from funcpipe.neighbours.history.learned import plot_errors

        write_file(partial(plot_errors, errors(everything.observations)), options.figure)
    counted = [one for one in in_hindsight if one.counts]
    best = {"jobs": len(counted), "best": sum(one.is_best for one in counted)}
    summary: dict[str, Any] = {"history": None if path is None else str(path), "known": found}
    summary |= {"chosen_way_best_in_hindsight": best, "hindsight": in_hindsight}
    draws = partial(show.history, found, path), partial(show.hindsight, in_hindsight)
    show.show(options.json, show.as_json(summary), *draws)


def observed_here(plans: Sequence[Plan], ran_on: str | None = None) -> "tuple[tuple[ObservedIteration, ...], ...]":
    """For each plan, an iteration as observed of like work at its platform, or at `ran_on`; left out without any."""
    from funcpipe.neighbours.history.journal import read_history
    from funcpipe.neighbours.history.learned import as_observed

    observations = read_history()
    found = (as_observed(plan, observations, ran_on=ran_on) for plan in plans)
    return tuple(() if one is None else (one,) for one in found)


def with_observed(document: str, observed: Any) -> str:
    """The JSON of a prediction, with what is `observed` beside it; as it is where nothing was."""
    return show.as_json(json.loads(document) | {OBSERVED: to_plain(observed)}) if observed else document
