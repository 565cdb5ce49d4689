"""The verb platforms, and the functions that it and profile start to measure something."""

import argparse
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from funcpipe import show as render
from funcpipe.cli.files import write_file
from funcpipe.core import PlatformSpec, to_text, write
from funcpipe.errors import InputError
from funcpipe.platforms.catalog import LOCAL, load_spec, open_storage, spec_names

if TYPE_CHECKING:
    from funcpipe.client.prepare.site import Site


def platforms(options: argparse.Namespace) -> None:
    """List, show or measure platform specifications."""
    if options.action == "list" and options.name is not None:
        raise InputError(f"list takes no platform; did you mean: funcpipe platforms show {options.name}")
    if options.action != "measure" and options.output is not None:
        raise InputError(f"{options.action} writes no file; -o is for measure (with --json, a shell's > does it)")
    of_storage = options.storage, options.streams, options.body_mb
    if options.action != "measure" and of_storage != (None, None, None):
        raise InputError(f"{options.action} measures nothing; --storage, --streams and --body-mb are for measure")
    if options.storage is None and of_storage != (None, None, None):
        raise InputError("--streams and --body-mb are about a storage; name it: --storage URL")
    if options.action == "list":
        specs = [load_spec(name) for name in spec_names()]
        render.show(options.json, render.as_json([spec.name for spec in specs]), partial(render.platforms, specs))
    elif options.action == "measure":
        _measure_storage(options) if options.storage is not None else _measure(options)
    elif options.name is None:
        raise InputError(f"name the platform to show: {', '.join(spec_names())}, or a specification's file")
    else:
        spec = load_spec(options.name)
        render.show(options.json, to_text(spec), partial(render.platform, spec))


def check_site(name: str | None, options: argparse.Namespace) -> None:
    """Raise InputError for options of functions where no functions are started."""
    if name is None and (options.like or options.max_usd is not None):
        raise InputError("--like and --max-usd apply to functions; say where they run: --on local")


def open_named_site(name: str | None, like: PlatformSpec | None) -> "AbstractContextManager[Site | None]":
    """The platform called `name`, with the limits of `like`; None for this process."""
    if name is None:
        return nullcontext()
    from funcpipe.client.prepare.site import open_site

    return open_site(name, like=like)


def _measure_storage(options: argparse.Namespace) -> None:
    """Show what this process measures of a storage."""
    if options.name is not None or options.like or options.max_usd is not None:
        raise InputError("--storage is measured from here: it goes without a platform, --like and --max-usd")
    from funcpipe.profiler.remote.storage_speed import BODY_MB, STREAMS, measure_storage

    storage = open_storage(options.storage, retry_s=0)
    report = measure_storage(
        storage,
        options.storage,
        streams=options.streams or STREAMS,
        body_bytes=(options.body_mb or BODY_MB) * 1_000_000,
    )
    if options.output is not None:
        write_file(partial(write, report), options.output)
    render.show(options.json, to_text(report), partial(render.storage_report, report))


def _measure(options: argparse.Namespace) -> None:
    """Write the specification of a platform with what functions measure there."""
    if options.output is None:
        raise InputError("say where to write the specification: -o FILE")
    like = load_spec(options.like) if options.like else None
    with open_named_site(options.name or LOCAL, like) as site:
        assert site is not None, "it has a name"
        spec = site.measure(max_usd=options.max_usd)
    write_file(partial(write, spec), options.output)
    render.show(options.json, to_text(spec), partial(render.platform, spec))
