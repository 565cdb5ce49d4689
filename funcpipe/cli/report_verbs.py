"""The verbs report and compare: a plan or a run as a page, a run beside its prediction, plans and runs side by side."""

import argparse
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from funcpipe import show as render
from funcpipe.cli.files import write_file
from funcpipe.core import Source, read_trace, to_text, write_side_by_side
from funcpipe.errors import InputError
from funcpipe.platforms.catalog import load_spec, open_storage

if TYPE_CHECKING:
    from funcpipe.show.material import Material


def report(options: argparse.Namespace) -> None:
    """Write a page about a plan or a run, or compare an observed run with its prediction."""
    if options.output is None:
        _in_text(options)
        return
    from funcpipe.show.page import write_page

    if options.figure or options.perfetto:
        raise InputError("--figure and --perfetto belong to the comparison in text: leave them out, or leave out -o")
    write_file(partial(write_page, _material(options)), options.output)
    render.show(
        options.json,
        render.as_json({"report": options.output}),
        lambda console: console.print(f"report written to {options.output}: open it in a browser", soft_wrap=True),
    )


def compare(options: argparse.Namespace) -> None:
    """Show plans or traces side by side."""
    from funcpipe.show.side_by_side import side_by_side

    found = side_by_side(options.files)
    render.show(options.json, render.as_json(found.plain()), partial(render.beside, found))


def _material(options: argparse.Namespace) -> "Material":
    """All that the command names, with the platform for which the plan was made."""
    from funcpipe.show.material import Material, merged, read_material

    paths = [*options.files, *([options.predicted] if options.predicted else [])]
    first, name = Material(), options.spec or options.platform
    named = load_spec(name) if name else None
    if options.storage is not None:
        from funcpipe.show.material import load_kept

        first, paths = load_kept(open_storage(options.storage), paths[0], named), paths[1:]
    material = merged(first, read_material(paths))
    if named is not None and material.spec is not None:
        raise InputError("the platform is given twice: leave out --platform and --spec, or the file")
    spec = named or material.spec
    if spec is None and material.profile is not None:
        spec = load_spec(material.profile.platform)
    return replace(material, spec=spec)


def _in_text(options: argparse.Namespace) -> None:
    """Compare an observed run with its prediction."""
    from funcpipe.analysis.compare import compare as compare_traces
    from funcpipe.analysis.compare import typical_step
    from funcpipe.show.timeline import draw

    if options.predicted is None or len(options.files) != 1 or options.storage is not None:
        raise InputError(
            "say what to make: -o report.html for a page, or name one observed trace and --predicted FILE to compare"
        )
    seen = options.files[0]
    predicted, observed = read_trace(options.predicted), read_trace(seen)
    if (predicted.source, observed.source) == (Source.EXECUTED, Source.SIMULATED):
        raise InputError(
            f"{seen} is a prediction and {options.predicted} was observed: they are swapped; "
            f"run: funcpipe report {options.predicted} --predicted {seen}"
        )
    if observed.source is Source.SIMULATED:
        raise InputError(
            f"{seen} is a prediction, written by `funcpipe simulate`; "
            "name the trace of a run, written by `funcpipe train --trace FILE`"
        )
    if predicted.source is Source.EXECUTED:
        raise InputError(
            f"--predicted {options.predicted} was observed in a run; "
            "name a prediction, written by `funcpipe simulate --trace FILE`"
        )
    comparison = compare_traces(predicted, observed)
    step = typical_step(observed)
    if options.figure:
        write_file(partial(draw, predicted, step), options.figure)
    if options.perfetto:
        write_file(partial(write_side_by_side, predicted, step), options.perfetto)
    render.show(options.json, to_text(comparison), partial(render.comparison, comparison, seen))
