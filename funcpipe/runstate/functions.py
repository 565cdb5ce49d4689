"""The functions of a run: clients and workers start them, and record each in storage so that anybody can stop it."""

import contextlib
import json
import logging
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

_log = logging.getLogger(__name__)

MAX_RESTARTS = 5
"""How often a worker is restarted while the run makes no step; after that the run is given up."""

_STOPS_AT_ONCE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedFunction:
    """A function that was started for an attempt of a worker, and its price per second."""

    worker: str
    attempt: int
    handle: Handle
    usd_s: float


def start_function(platform: Platform, storage: Storage, keys: Keys, spec: WorkerSpec) -> StartedFunction:
    """Invoke a function for the attempt in `spec`, and record it."""
    handle = platform.invoke(spec)
    usd_s = spec.account.usd_s
    document = FunctionDocument(
        worker=spec.worker, attempt=spec.attempt, handle=json.dumps(to_plain(handle)), usd_s=usd_s
    )
    put_document(storage, keys.function(spec.worker, spec.attempt, secrets.token_hex(4)), document)
    _log.info("started function %s as attempt %d of worker %s", handle.name, spec.attempt, spec.worker)
    return StartedFunction(worker=spec.worker, attempt=spec.attempt, handle=handle, usd_s=usd_s)


def stop_functions(platform: Platform, handles: Iterable[Handle]) -> None:
    """Stop functions in parallel, as a cloud may take seconds for each. One that the platform no longer knows has
    ended.
    """

    def stop(handle: Handle) -> None:
        try:
            platform.stop(handle)
        except PlatformError as error:
            _log.debug("function %s of worker %s could not be stopped: %s", handle.name, handle.worker, error)

    with ThreadPoolExecutor(_STOPS_AT_ONCE) as pool:
        list(pool.map(stop, handles))


def list_functions(storage: Storage, keys: Keys, worker: str | None = None) -> tuple[StartedFunction, ...]:
    """The functions that anybody started for `worker`, or for all workers, in order of worker and attempt."""
    prefix = keys.functions if worker is None else f"{keys.functions}{worker}/"
    found = []
    for key in storage.list(prefix):
        with contextlib.suppress(KeyMissing):  # deleted since it was listed
            document = get_document(storage, FunctionDocument, key)
            handle: Handle = from_plain(Handle, json.loads(document.handle), source=key)
            found.append(
                StartedFunction(worker=document.worker, attempt=document.attempt, handle=handle, usd_s=document.usd_s)
            )
    return tuple(found)
