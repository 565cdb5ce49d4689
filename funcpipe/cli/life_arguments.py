"""What can be said on the command line of the lives of runs."""

import argparse
from typing import Any

from funcpipe.cli.parts import add_choice, add_verb


def add_life(verb: argparse.ArgumentParser) -> None:
    """How long a run lives, and what of it stays."""
    life = verb.add_argument_group("the life of the run")
    life.add_argument("--storage", metavar="URL", help="where objects lie (default: a temporary folder)")
    life.add_argument("--run", dest="run_name", metavar="NAME", help="what to call the run (default: a drawn name)")
    life.add_argument("--resume", metavar="RUN", help="go on with a run of --storage, by this plan or another")
    life.add_argument("--detach", action="store_true", help="leave the run to itself; --resume RUN collects it")
    life.add_argument("--max-usd", type=float, metavar="USD", help="the run ends before it costs more")
    life.add_argument("--deadline", type=float, metavar="S", help="the run ends before it takes longer")
    add_choice(
        life, "--on-oom", ["fail", "grow"], "fail", "when a function runs out of memory: give up, or go on larger"
    )
    life.add_argument(
        "--checkpoint", type=int, metavar="N", help="save every N steps (default: by what is measured, see docs)"
    )
    life.add_argument(
        "--failure-interval",
        type=float,
        default=86_400.0,
        metavar="S",
        help="save as if a function failed once in so many seconds (default: %(default)s)",
    )


def add_status(verbs: Any) -> None:
    """`funcpipe status`."""
    verb = add_verb(verbs, "status", "say how a run fares", "funcpipe status RUN --storage URL", "run_verbs")
    _add_run(verb)


def add_stop(verbs: Any) -> None:
    """`funcpipe stop`."""
    verb = add_verb(
        verbs,
        "stop",
        "end a run after a step, so that it can be resumed",
        "funcpipe stop RUN --storage URL",
        "run_verbs",
    )
    _add_run(verb)
    verb.add_argument(
        "--wait", type=float, default=60.0, metavar="S", help="then end its functions anyway (default: %(default)s)"
    )


def add_clean(verbs: Any) -> None:
    """`funcpipe clean`."""
    verb = add_verb(
        verbs,
        "clean",
        "end a run's functions and delete all its objects",
        "funcpipe clean RUN --storage URL",
        "run_verbs",
    )
    _add_run(verb)


def _add_run(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("name", metavar="RUN", help="the run's name")
    verb.add_argument("--storage", metavar="URL", required=True, help="where its objects lie")
