"""The options of history."""

from typing import Any

from funcpipe.cli.options import add_verb


def add_history(verbs: Any) -> None:
    """`funcpipe history`."""
    add_verb(
        verbs,
        "history",
        "show what earlier runs have taught about predictions",
        "funcpipe history\n  FUNCPIPE_HISTORY=other.jsonl funcpipe history --json",
        module="history_verbs",
    )
