"""Functions are started by clients and by functions; each is noted in the storage, for whoever must end it."""

import contextlib
import json
import secrets
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from funcpipe.core import FunctionDocument, WorkerSpec
from funcpipe.core.json_form import from_plain, to_plain
from funcpipe.errors import KeyMissing, PlatformError
from funcpipe.platforms.base import Handle, Platform, Storage
from funcpipe.runstate.documents import get_document, put_document
from funcpipe.runstate.keys import Keys

RESTARTS = 5
"""A worker that has died so often since a step of the run last ended is given up."""

_STOPS_AT_ONCE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A function that was started for an attempt of a worker, and what it costs a second."""

    worker: str
    attempt: int
    handle: Handle
    usd_s: float


def start(platform: Platform, storage: Storage, keys: Keys, spec: WorkerSpec) -> Started:
    """Invoke a function for the attempt in `spec`."""
    handle = platform.invoke(spec)
    note = FunctionDocument(
        worker=spec.worker, attempt=spec.attempt, handle=json.dumps(to_plain(handle)), usd_s=spec.account.usd_s
    )
    put_document(storage, keys.function(spec.worker, spec.attempt, secrets.token_hex(4)), note)
    return Started(worker=spec.worker, attempt=spec.attempt, handle=handle, usd_s=spec.account.usd_s)


def end(platform: Platform, handles: Iterable[Handle]) -> None:
    """End functions, side by side, as a cloud may take seconds for each; one that it has forgotten has ended."""

    def stop(handle: Handle) -> None:
        with contextlib.suppress(PlatformError):
            platform.stop(handle)

    with ThreadPoolExecutor(_STOPS_AT_ONCE) as pool:
        list(pool.map(stop, handles))


def started(storage: Storage, keys: Keys, worker: str | None = None) -> tuple[Started, ...]:
    """The functions that were started for `worker`, or for all, by anybody, in order of worker and attempt."""
    prefix = keys.functions if worker is None else f"{keys.functions}{worker}/"
    found = []
    for key in storage.list(prefix):
        try:
            note = get_document(storage, FunctionDocument, key)
        except KeyMissing:
            continue  # deleted since it was listed
        handle: Handle = from_plain(Handle, json.loads(note.handle), source=key)
        found.append(Started(worker=note.worker, attempt=note.attempt, handle=handle, usd_s=note.usd_s))
    return tuple(found)
