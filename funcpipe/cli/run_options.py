"""The options of status, stop, clean, export and key."""

import argparse
from typing import Any

from funcpipe.cli.numbers import not_negative, whole
from funcpipe.cli.options import add_verb

_STORAGE = "--storage file:///tmp/runs"


def add_status(verbs: Any) -> None:
    """`funcpipe status`."""
    verb = add_verb(
        verbs,
        "status",
        "show what each worker of a run is doing",
        f"funcpipe status RUN {_STORAGE}",
        module="run_verbs",
    )
    _add_run(verb)


def add_stop(verbs: Any) -> None:
    """`funcpipe stop`."""
    verb = add_verb(
        verbs,
        "stop",
        "stop a run at a saved step, to resume it later",
        f"funcpipe stop RUN {_STORAGE}",
        module="run_verbs",
    )
    _add_run(verb)
    verb.add_argument(
        "--wait",
        type=not_negative,
        default=60.0,
        metavar="SECONDS",
        help="end the functions at once if they have not stopped after this time",
    )


def add_clean(verbs: Any) -> None:
    """`funcpipe clean`."""
    verb = add_verb(
        verbs,
        "clean",
        "end a run's functions and delete all of its objects",
        f"funcpipe clean RUN {_STORAGE}",
        module="run_verbs",
    )
    _add_run(verb)
    verb.add_argument("--take-over", action="store_true", help="even if another command trains the run")


def add_export(verbs: Any) -> None:
    """`funcpipe export`."""
    verb = add_verb(
        verbs,
        "export",
        "write the model of a run, as it was saved last",
        f"funcpipe export RUN {_STORAGE} -o model.safetensors",
        module="run_verbs",
    )
    _add_run(verb)
    verb.add_argument("--step", type=whole(0), metavar="N", help="the model after N steps (default: the newest saved)")
    verb.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="the file: .safetensors, or .pt or .pth with torch.save (default: model.safetensors)",
    )


def add_key(verbs: Any) -> None:
    """`funcpipe key`."""
    verb = add_verb(
        verbs,
        "key",
        "print a run's key, to supervise it from elsewhere",
        f"funcpipe key RUN {_STORAGE}",
        module="run_verbs",
    )
    _add_run(verb)


def _add_run(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("name", metavar="RUN", help="name of the run")
    verb.add_argument("--storage", metavar="URL", required=True, help="where the run keeps its objects")
