"""Which runs their clients have left to themselves: a mark for each, so that a watchdog finds them with one request.

Marks lie beside the runs, where no run's object can lie, as the name of a run begins with a letter or a digit. The mark
of run-1/g0000/ is the empty object _watch/run-1/g0000.
"""

from funcpipe.core import MARKS
from funcpipe.platforms.base import Storage
from funcpipe.runstate.keys import Keys


def mark_detached(storage: Storage, keys: Keys) -> None:
    """From now on watchdogs restart workers of this generation."""
    storage.put(_mark(keys.prefix), b"")


def unmark_generation(storage: Storage, prefix: str) -> None:
    """No watchdog is to restart workers of the generation with that prefix any more."""
    storage.delete(_mark(prefix))


def unmark_run(storage: Storage, run: str) -> None:
    """No watchdog is to restart workers of `run` any more, whether it was detached or not."""
    storage.delete_many(storage.list(_mark(f"{run}/") + "/"))


def list_detached(storage: Storage) -> tuple[str, ...]:
    """The prefixes of all generations that are marked."""
    return tuple(f"{key.removeprefix(MARKS)}/" for key in storage.list(MARKS))


def _mark(prefix: str) -> str:
    return f"{MARKS}{prefix.removesuffix('/')}"
