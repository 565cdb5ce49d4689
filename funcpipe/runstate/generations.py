"""The generations of a run. Starting a run makes generation 0; each time it is resumed, a new generation follows.

A generation is first reserved under its number, then prepared, and counts from the moment that its record is written.
"""

import logging

from funcpipe.core import LeaseDocument, RunRecord, WorkerSpec
from funcpipe.errors import KeyExists, KeyMissing, RunUnknown
from funcpipe.platforms.base import Storage
from funcpipe.runstate.documents import get_document, get_listed_document, put_document
from funcpipe.runstate.keys import Keys

_log = logging.getLogger(__name__)


def reserve_generation(storage: Storage, run: str) -> Keys:
    """The keys of a new generation of `run`, which nobody else gets."""
    number = max(list_generations(storage, run), default=-1) + 1
    while True:
        keys = Keys(run, number)
        try:
            put_document(storage, keys.reservation, LeaseDocument(holder="client"), if_absent=True)
        except KeyExists:
            number += 1
            continue
        _log.info("generation %d of run %s begins", number, run)
        return keys


def list_generations(storage: Storage, run: str) -> tuple[int, ...]:
    """The numbers of the reserved generations of `run`, in ascending order."""
    prefix = Keys(run).reservations
    numbers = [key.removeprefix(prefix) for key in storage.list(prefix)]
    return tuple(sorted(int(number) for number in numbers if number.isdecimal()))


def write_record(storage: Storage, keys: Keys, record: RunRecord) -> None:
    """Write the record of a generation: from now on it counts."""
    put_document(storage, keys.record, record)


def newest_record(storage: Storage, run: str) -> RunRecord:
    """The record of the newest generation of `run` that counts. Raises RunUnknown."""
    for number in reversed(list_generations(storage, run)):
        try:
            return get_document(storage, RunRecord, Keys(run, number).record)
        except KeyMissing:
            _log.debug("generation %d of run %s has no record: its client died before it began", number, run)
    raise RunUnknown(f"there is no run {run!r} in this storage; its name is what `train` printed")


def load_worker_specs(storage: Storage, keys: Keys) -> tuple[WorkerSpec, ...]:
    """The invocation payloads of the first attempts of a generation's workers."""
    return tuple(get_listed_document(storage, WorkerSpec, key) for key in storage.list(keys.payloads))


def delete_generation(storage: Storage, keys: Keys) -> None:
    """Delete all objects of one generation; workers that still run lose their leases and end."""
    _delete(storage, keys.prefix)
    storage.delete(keys.reservation)


def delete_run(storage: Storage, keys: Keys) -> None:
    """Delete all objects of the run."""
    _delete(storage, keys.run_prefix)


def _delete(storage: Storage, prefix: str) -> None:
    found = storage.list(prefix)
    for key in found:
        storage.delete(key)
    _log.info("deleted %d objects below %s", len(found), prefix)
