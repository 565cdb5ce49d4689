"""What `funcpipe train` says of the job's cost before it starts, and whom it asks."""

import argparse
import sys
from functools import partial
from typing import TYPE_CHECKING

from funcpipe.cli import render
from funcpipe.cli.factories import load_data
from funcpipe.core import JobEstimate, Plan, Validation, to_text
from funcpipe.errors import InputError
from funcpipe.platforms.catalog import LOCAL, is_ray, load_spec

if TYPE_CHECKING:
    from funcpipe.api import FuncPipe


def dry_run(options: argparse.Namespace, plan: Plan, pipe: "FuncPipe", validation: Validation | None) -> None:
    """Print what the whole job is expected to take, from its start; nothing is started."""
    functions = options.like or (LOCAL if options.platform == LOCAL else None)
    prices = load_spec(options.spec) if options.spec else None
    data = load_data(options.data)
    found = pipe.estimate(
        data, epochs=options.epochs, platform=functions, plan=plan, prices=prices, validation=validation
    )
    render.show(options.json, to_text(found), partial(render.job_estimate, found, options.max_usd))


def confirm(options: argparse.Namespace, estimate: JobEstimate | None) -> None:
    """Ask on a terminal whether a job that costs money is to start.

    Raises InputError if the answer is no; or if nobody can be asked, and neither --yes nor a limit was given.
    """
    if options.platform == LOCAL or is_ray(options.platform) or options.yes:
        return
    line = (
        "what it costs is not known: the plan has no estimate" if estimate is None else estimate.line(options.max_usd)
    )
    if sys.stdin.isatty() and sys.stderr.isatty():
        print(f"{line}\ngo on? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise InputError("nothing was started")
    elif options.max_usd is None:
        raise InputError(
            f"training on {options.platform} costs money: {line}; as there is no terminal to ask on, give --yes to go "
            "on, or --max-usd to limit the cost"
        )
