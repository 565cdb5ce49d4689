"""The options of platforms."""

from typing import Any

from funcpipe.cli.numbers import whole
from funcpipe.cli.options import add_measuring, add_verb


def add_platforms(verbs: Any) -> None:
    """`funcpipe platforms`."""
    verb = add_verb(
        verbs,
        "platforms",
        "list, show or measure platform specifications",
        "funcpipe platforms show aws-lambda --json\n"
        "  funcpipe platforms measure local --like aws-lambda -o mine.json\n"
        "  funcpipe platforms measure --storage redis://host/0",
        module="platform_verbs",
    )
    verb.add_argument(
        "action",
        choices=["list", "show", "measure"],
        nargs="?",
        default="list",
        metavar="{list,show,measure}",
        help="list all platforms, show one, or measure one with functions of every size (default: list)",
    )
    verb.add_argument(
        "name",
        nargs="?",
        metavar="PLATFORM",
        help="name or specification file to show; or where to measure: `local`, or a deployment's URL",
    )
    measure = verb.add_argument_group("measure")
    add_measuring(measure)
    measure.add_argument(
        "-o", "--output", metavar="FILE", help="where to write what was measured (required for a specification)"
    )
    measure.add_argument(
        "--storage", metavar="URL", help="measure this storage from here, without functions: latencies and bandwidths"
    )
    measure.add_argument(
        "--streams", type=whole(), metavar="N", help="of --storage: how many bodies move at once (default: 4)"
    )
    measure.add_argument(
        "--body-mb", type=whole(), metavar="MB", help="of --storage: the largest body that is moved (default: 64)"
    )
