"""The options of watch."""

from typing import Any

from funcpipe.cli.numbers import positive
from funcpipe.cli.options import add_verb

EVERY_S = 5.0


def add_watch(verbs: Any) -> None:
    """`funcpipe watch`."""
    verb = add_verb(
        verbs,
        "watch",
        "show a run as it goes: workers, losses, dollars",
        "funcpipe watch RUN --storage file:///tmp/runs",
        module="watch_verb",
    )
    verb.description = (
        "Show a run while it goes on: workers, losses, dollars, warnings. It only reads, so it can be left (q or "
        "Ctrl-C) and started again at any time, from any machine that has the run's key. When the run has ended, it "
        "says how, and ends with the exit code of `funcpipe status`. Where there is no terminal, it prints lines.\n\n"
        "A poll takes about 12 requests to the storage, 8 to 10 of them lists, and one more for each worker and each "
        "replica: at the prices of S3, some $0.04 an hour with the default interval."
    )
    verb.add_argument("name", metavar="RUN", help="name of the run")
    verb.add_argument("--storage", metavar="URL", required=True, help="where the run keeps its objects")
    verb.add_argument(
        "--interval", type=positive, default=EVERY_S, metavar="SECONDS", help="pause between two polls of the run"
    )
    verb.add_argument("--once", action="store_true", help="poll once, and end with the exit code of `status`")
