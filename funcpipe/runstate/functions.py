"""The functions of a run: clients and workers start them, and record each in storage so that any client can stop it."""

import secrets

from funcpipe.core import WorkerSpec
from funcpipe.errors import Superseded
from funcpipe.platforms.base import Platform, Storage
from funcpipe.platforms.function_group import StartedFunction, started_on, stop_functions
from funcpipe.runstate.documents import put_document, readable_documents
from funcpipe.runstate.keys import Keys

OUT_OF_REACH_S = 5.0
"""If listing heartbeats takes longer, the storage is in trouble, and the silence of others proves nothing."""


def start_function(
    platform: Platform, storage: Storage, keys: Keys, spec: WorkerSpec, *, patient: bool = False
) -> StartedFunction:
    """Invoke a function for the attempt in `spec`, and record it; if that fails, the function is stopped.

    Who is `patient` waits while the platform is busy. Raises PlatformError or PlatformRefused.
    """
    started = started_on(platform, spec, usd_s=spec.account.usd_s, patient=patient)
    try:
        put_document(storage, keys.function(spec.worker, spec.attempt, secrets.token_hex(4)), started)
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


def list_functions(storage: Storage, keys: Keys, worker: str | None = None) -> tuple[StartedFunction, ...]:
    """Return the functions started for `worker`, or for all workers, in order of worker, attempt and start."""
    prefix = keys.functions if worker is None else f"{keys.functions}{worker}/"
    found = readable_documents(storage, StartedFunction, storage.list(prefix))
    return tuple(sorted(found, key=lambda function: (function.worker, function.attempt, function.started_at_s)))
