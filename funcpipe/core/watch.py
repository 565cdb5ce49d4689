"""The payload of a watchdog, the function that restarts workers of runs without a client."""

from dataclasses import dataclass, field
from typing import ClassVar

from funcpipe.core import checks

MARKS = "_watch/"
"""The prefix of the keys of all marks of detached runs, see `runstate.detached`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSpec:
    """The payload of a watchdog, a function that restarts the silent workers of detached runs.

    It watches the detached runs in the storage at the URL `storage`, or `run` alone, whose RunKey has the text
    `run_key`; without one, the platform at the URL `platform` unwraps what marks hold. It ends when no worker seems
    silent, or with `until_ended` when there is no such run any more.
    """

    FORMAT: ClassVar[str] = "funcpipe.watch/1"

    storage: str
    platform: str = ""
    run: str | None = None
    run_key: str = field(default="", repr=False)
    until_ended: bool = False

    def __post_init__(self) -> None:
        checks.filled("storage", self.storage)
