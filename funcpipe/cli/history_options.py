"""The options of history."""

from typing import Any

from funcpipe.cli.options import add_verb


def add_history(verbs: Any) -> None:
    """`funcpipe history`."""
    verb = add_verb(
        verbs,
        "history",
        "show what earlier runs have taught about predictions",
        "funcpipe history\n  FUNCPIPE_HISTORY=other.jsonl funcpipe history --json",
        module="history_verbs",
    )
    verb.add_argument("--figure", metavar="FILE", help="draw the errors of predictions, run after run, into FILE")
