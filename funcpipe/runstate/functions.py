"""The functions of a run: clients and workers start them, and record each in storage so that any client can stop it."""

import json
import logging
import secrets
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from funcpipe.core import FunctionDocument, WorkerSpec
from funcpipe.core.backoff import Backoff
from funcpipe.core.json_form import from_plain, to_plain
from funcpipe.errors import PlatformError, Superseded
from funcpipe.platforms.base import Handle, Platform, Storage
from funcpipe.platforms.starting import invoke_with_retry
from funcpipe.runstate.documents import put_document, readable_documents
from funcpipe.runstate.keys import Keys

_log = logging.getLogger(__name__)

MAX_RESTARTS = 5
"""The restarts of a worker while the run makes no step; after that the run is given up."""

RESTART_PAUSES = Backoff(first_s=2.0, most_s=30.0)
"""The pauses before a worker is restarted again, while the run makes no step; the first restart comes at once."""

OUT_OF_REACH_S = 5.0
"""If listing heartbeats takes longer, the storage is in trouble, and the silence of others proves nothing."""

_STOPS_AT_ONCE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedFunction:
    """A function that was started for an attempt of a worker, with its price per second and its memory.

    It was started at `started_at_s` by the clock of who started it; 0 if that was not recorded.
    """

    worker: str
    attempt: int
    handle: Handle
    usd_s: float
    memory_mb: int | None = None
    started_at_s: float = 0.0


def start_function(
    platform: Platform, storage: Storage, keys: Keys, spec: WorkerSpec, *, patient: bool = False
) -> StartedFunction:
    """Invoke a function for the attempt in `spec`, and record it; if that fails, the function is stopped.

    Who is `patient` waits while the platform is busy. Raises PlatformError or PlatformRefused.
    """
    started_at_s = time.time()
    started = StartedFunction(
        worker=spec.worker,
        attempt=spec.attempt,
        handle=invoke_with_retry(platform, spec) if patient else platform.invoke(spec),
        usd_s=spec.account.usd_s,
        memory_mb=spec.memory_mb,
        started_at_s=started_at_s,
    )
    document = FunctionDocument(
        worker=started.worker,
        attempt=started.attempt,
        handle=json.dumps(to_plain(started.handle)),
        usd_s=started.usd_s,
        memory_mb=started.memory_mb,
        started_at_s=started.started_at_s,
    )
    try:
        put_document(storage, keys.function(spec.worker, spec.attempt, secrets.token_hex(4)), document)
    except BaseException:
        stop_functions(platform, [started.handle])
        raise
    _log.info("started function %s as attempt %d of worker %s", started.handle.name, spec.attempt, spec.worker)
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
    """Return the functions started for `worker`, or for all workers, in order of worker, attempt and start."""
    prefix = keys.functions if worker is None else f"{keys.functions}{worker}/"
    found = []
    for document in readable_documents(storage, FunctionDocument, storage.list(prefix)):
        handle: Handle = from_plain(Handle, json.loads(document.handle), source="a function's handle")
        found.append(
            StartedFunction(
                worker=document.worker,
                attempt=document.attempt,
                handle=handle,
                usd_s=document.usd_s,
                memory_mb=document.memory_mb,
                started_at_s=document.started_at_s,
            )
        )
    return tuple(sorted(found, key=lambda function: (function.worker, function.attempt, function.started_at_s)))
