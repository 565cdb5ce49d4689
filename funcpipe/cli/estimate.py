"""What training is expected to take and to cost, which is printed or asked about before it starts."""

import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from funcpipe import show
from funcpipe.cli.factories import load_data
from funcpipe.cli.report import observed_here, with_observed
from funcpipe.cli.verbs import Options
from funcpipe.core import JobEstimate, Plan, Validation, to_text
from funcpipe.core.history import local_place
from funcpipe.core.process import say
from funcpipe.errors import InputError
from funcpipe.platforms.catalog import LOCAL, is_ray, load_spec, with_region

if TYPE_CHECKING:
    from funcpipe.api import FuncPipe


def ask(options: Options, lines: Sequence[str]) -> None:
    """Ask on a terminal whether training that costs money is to start; `lines` say how much, the first in short.

    Raises InputError if the answer is no; or without a terminal to ask on, if neither --yes nor a limit was given.
    """
    if _is_free(options):
        return
    if sys.stdin.isatty() and sys.stderr.isatty():
        say("\n".join([*lines, "go on? [y/N] "]), end="")
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise InputError("nothing was started")
    elif options.max_usd is None:
        raise InputError(
            f"training on {options.platform} costs money: {lines[0]}; as there is no terminal to ask on, give --yes to "
            "go on, or --max-usd to limit the cost"
        )


def confirm(options: Options, plan: Plan, estimate: JobEstimate | None) -> None:
    """Ask on a terminal whether a job that costs money is to start. Raises InputError as `ask` does."""
    if _is_free(options):
        return
    line = (
        "what it costs is not known: the plan has no estimate" if estimate is None else estimate.line(options.max_usd)
    )
    (observed,) = observed_here([plan], _place(options, plan))
    ask(options, [line, *show.observed_lines(observed)])


def _is_free(options: Options) -> bool:
    return options.yes or options.platform in (None, LOCAL) or is_ray(options.platform)


def dry_run(options: Options, plan: Plan, pipe: "FuncPipe", validation: Validation | None) -> None:
    """Print the expected time and cost of the whole job, from its start; start nothing."""
    functions = options.like or (None if is_ray(options.platform) else with_region(options.platform))
    prices = load_spec(options.spec) if options.spec else None
    data = load_data(options.data)
    found = pipe.estimate(
        data, epochs=options.epochs, platform=functions, plan=plan, prices=prices, validation=validation
    )
    (observed,) = observed_here([plan], _place(options, plan))
    draws = partial(show.job_estimate, found, options.max_usd), partial(show.observed, observed)
    show.show(options.json, with_observed(to_text(found), observed), *draws)


def _place(options: Options, plan: Plan) -> str:
    """The place where the job will run, as the history names it."""
    if options.platform in (None, LOCAL):
        return local_place(load_spec(options.like).name if options.like else LOCAL)
    return options.platform.partition("://")[0] if is_ray(options.platform) else plan.platform
