"""The verb platforms, and the functions that it and profile start to measure something."""

import argparse
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from funcpipe.cli import render
from funcpipe.cli.files import write_file
from funcpipe.core import to_text, write
from funcpipe.errors import InputError
from funcpipe.platforms.catalog import LOCAL, load_spec, spec_names

if TYPE_CHECKING:
    from funcpipe.client.site import Site


def platforms(options: argparse.Namespace) -> None:
    """List, show or measure platform specifications."""
    if options.action == "list":
        specs = [load_spec(name) for name in spec_names()]
        render.show(options.json, render.as_json([spec.name for spec in specs]), partial(render.platforms, specs))
    elif options.action == "measure":
        _measure(options)
    elif options.name is None:
        raise InputError(f"name the platform to show: {', '.join(spec_names())}, or a specification's file")
    else:
        spec = load_spec(options.name)
        render.show(options.json, to_text(spec), partial(render.platform, spec))


def open_named_site(name: str | None, options: argparse.Namespace) -> "AbstractContextManager[Site | None]":
    """The platform called `name`, with the limits of `--like`; None for this process."""
    if name is None:
        if options.like or options.max_usd is not None:
            raise InputError("--like and --max-usd apply to functions; say where they run: --on local")
        return nullcontext()
    from funcpipe.client.site import open_site

    return open_site(name, like=load_spec(options.like) if options.like else None)


def _measure(options: argparse.Namespace) -> None:
    """Write the specification of a platform with what functions measure there."""
    if options.output is None:
        raise InputError("say where to write the specification: -o FILE")
    with open_named_site(options.name or LOCAL, options) as site:
        assert site is not None, "it has a name"
        spec = site.measure(max_usd=options.max_usd)
    write_file(partial(write, spec), options.output)
    render.show(options.json, to_text(spec), partial(render.platform, spec))
