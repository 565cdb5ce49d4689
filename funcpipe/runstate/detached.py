"""The marks of detached runs: one for each, so that a watchdog finds them with one request.

Marks lie beside the runs, where no run's object can lie, as the name of a run begins with a letter or a digit. The mark
of run-1/g0000-3fa9c2d11b0c77e4/ is the object _watch/run-1/g0000-3fa9c2d11b0c77e4. It holds the key of the run, wrapped
so that only the platform's watchdog can read it.
"""

from collections.abc import Callable

from funcpipe.core import MARKS
from funcpipe.core.run_key import RunKey
from funcpipe.errors import InvalidValue, KeyMissing, PlatformRefused
from funcpipe.platforms.base import Storage
from funcpipe.runstate.keys import Keys, generation_of


def mark_detached(storage: Storage, keys: Keys, wrapped: str) -> None:
    """From now on watchdogs restart workers of this generation, whose key is `wrapped` for them."""
    storage.put(_mark(keys.prefix), wrapped.encode())


class MarkedKeys:
    """Knows the keys of detached runs, as the platform's watchdog does: it can `unwrap` them."""

    def __init__(self, storage: Storage, unwrap: Callable[[str], str]) -> None:
        self._storage = storage
        self._unwrap = unwrap
        self._known: dict[str, RunKey] = {}

    def find(self, keys: Keys) -> RunKey | None:
        """Return the key of a generation that is marked, if it was wrapped for this platform."""
        if keys.prefix not in self._known:
            try:
                wrapped = self._storage.get(_mark(keys.prefix)).decode("ascii", "replace")
                run_key = RunKey(self._unwrap(wrapped))
            except (KeyMissing, PlatformRefused, InvalidValue):
                return None
            if run_key.fingerprint != keys.nonce:
                return None
            self._known[keys.prefix] = run_key
        return self._known[keys.prefix]


def unmark_generation(storage: Storage, prefix: str) -> None:
    """Let no watchdog restart workers of the generation with that prefix any more."""
    storage.delete(_mark(prefix))


def unmark_run(storage: Storage, run: str) -> None:
    """Let no watchdog restart workers of `run` any more, whether it was detached or not."""
    storage.delete_many(marks_of(storage, run))


def marks_of(storage: Storage, run: str) -> tuple[str, ...]:
    """Return the keys of the marks of all generations of `run`."""
    return tuple(key for key in storage.list(_mark(f"{run}/") + "/") if _is_mark(key))


def list_detached(storage: Storage) -> tuple[str, ...]:
    """Return the prefixes of all generations that are marked."""
    return tuple(f"{key.removeprefix(MARKS)}/" for key in storage.list(MARKS))


def _mark(prefix: str) -> str:
    return f"{MARKS}{prefix.removesuffix('/')}"


def _is_mark(key: str) -> bool:
    keys = generation_of(key.removeprefix(MARKS))
    return keys is not None and key == _mark(keys.prefix)
