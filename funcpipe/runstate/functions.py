"""The functions of a run, recorded in storage so that any client can stop them; and the marks of detached runs.

Marks lie beside the runs, where no run's object can lie, as the name of a run begins with a letter or a digit: so a
watchdog finds all of them with one request. The mark of run-1/g0000-3fa9c2d11b0c77e4/ is the object
_watch/run-1/g0000-3fa9c2d11b0c77e4. It holds the key of the run, wrapped so that only that watchdog can read it.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from funcpipe.core import WATCH_PREFIX, WorkerSpec
from funcpipe.core.run_key import RunKey
from funcpipe.errors import InvalidValue, KeyMissing, PlatformRefused, Superseded
from funcpipe.platforms.base import Platform, Storage
from funcpipe.platforms.function_group import StartedFunction, started_on, stop_functions
from funcpipe.runstate.documents import find_readable_document, put_document, readable_documents
from funcpipe.runstate.keys import Keys, generation_of

MANY = 16
"""The handles of more functions that are started together are written once more, as one object."""

OUT_OF_REACH_S = 5.0
"""If listing heartbeats takes longer, the storage is in trouble, and the silence of others proves nothing."""


def start_function(
    platform: Platform,
    storage: Storage,
    keys: Keys,
    spec: WorkerSpec,
    *,
    sleep: Callable[[float], object] | None = None,
) -> StartedFunction:
    """Invoke a function for the attempt in `spec`, and record it; if that fails, the function is stopped.

    `sleep`, if given, waits while the platform is busy. Raises PlatformError or PlatformRefused.
    """
    started = started_on(platform, spec, usd_s=spec.account.usd_s, sleep=sleep)
    started = replace(started, token=secrets.token_hex(4))
    try:
        put_document(storage, _key(keys, started), started)
    except BaseException:
        stop_functions(platform, [started.handle])
        raise
    return started


def start_for_worker(platform: Platform, storage: Storage, keys: Keys, spec: WorkerSpec) -> StartedFunction:
    """Start a function as a worker or a watchdog does; raises Superseded if the run is being deleted.

    A client that deletes a run deletes its payloads before listing functions. So either it sees this one, or the
    payloads are gone here, and the function is stopped.
    """
    begun = start_function(platform, storage, keys, spec)
    if not storage.list(keys.payloads):
        stop_functions(platform, [begun.handle])
        raise Superseded(f"run {keys.run} is being deleted")
    return begun


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedTogether:
    """The functions that a client has started at the beginning of a generation."""

    FORMAT: ClassVar[str] = "funcpipe.functions/1"

    functions: tuple[StartedFunction, ...]


def record_together(storage: Storage, keys: Keys, started: Sequence[StartedFunction]) -> None:
    """Write the handles of the `started` functions, if they are many, as one object that is read in their place.

    Each has its own object, written as soon as it was started, which stays: a client that dies loses none.
    """
    if len(started) > MANY:
        put_document(storage, keys.started_together, StartedTogether(functions=tuple(started)))


def list_functions(storage: Storage, keys: Keys, worker: str | None = None) -> tuple[StartedFunction, ...]:
    """Return the functions started for `worker`, or for all workers, in order of worker, attempt and start."""
    listed = storage.list(keys.functions if worker is None else f"{keys.functions}{worker}/")
    together = None
    if keys.started_together in listed:
        together = find_readable_document(storage, StartedTogether, keys.started_together)
    known = {} if together is None else {_key(keys, function): function for function in together.functions}
    own = [key for key in listed if key not in known and key != keys.started_together]
    found = [*(known[key] for key in listed if key in known), *readable_documents(storage, StartedFunction, own)]
    return tuple(sorted(found, key=lambda function: (function.worker, function.attempt, function.started_at_s)))


def _key(keys: Keys, started: StartedFunction) -> str:
    return keys.function(started.worker, started.attempt, started.token)


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
    return tuple(f"{key.removeprefix(WATCH_PREFIX)}/" for key in storage.list(WATCH_PREFIX))


def _mark(prefix: str) -> str:
    return f"{WATCH_PREFIX}{prefix.removesuffix('/')}"


def _is_mark(key: str) -> bool:
    keys = generation_of(key.removeprefix(WATCH_PREFIX))
    return keys is not None and key == _mark(keys.prefix)
