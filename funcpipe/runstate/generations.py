"""The generations of a run: which there are, what they are, and how they go."""

from funcpipe.core import LeaseDocument, RunRecord, WorkerSpec
from funcpipe.errors import KeyExists, KeyMissing, RunUnknown
from funcpipe.platforms.base import Storage
from funcpipe.runstate.documents import get_document, get_listed_document, put_document
from funcpipe.runstate.keys import Keys


def reserve(storage: Storage, run: str) -> Keys:
    """A generation of `run` that nobody else has."""
    number = max((number for number in generations(storage, run)), default=-1) + 1
    while True:
        keys = Keys(run, number)
        try:
            put_document(storage, keys.reservation, LeaseDocument(holder="client"), if_absent=True)
        except KeyExists:
            number += 1
            continue
        return keys


def generations(storage: Storage, run: str) -> tuple[int, ...]:
    """The numbers of the generations of `run` that were reserved."""
    prefix = Keys(run).reservations
    numbers = [key.removeprefix(prefix) for key in storage.list(prefix)]
    return tuple(sorted(int(number) for number in numbers if number.isdecimal()))


def record_run(storage: Storage, keys: Keys, record: RunRecord) -> None:
    """Write what the generation is: from here on it counts."""
    put_document(storage, keys.record, record)


def find_run(storage: Storage, run: str) -> RunRecord:
    """The newest generation of `run` that counts; raises RunUnknown."""
    for number in reversed(generations(storage, run)):
        try:
            return get_document(storage, RunRecord, Keys(run, number).record)
        except KeyMissing:
            continue  # its client died before it had begun
    raise RunUnknown(f"there is no run {run!r} in this storage; its name is what `train` printed")


def payloads(storage: Storage, keys: Keys) -> tuple[WorkerSpec, ...]:
    """What the workers of a generation were told when it began."""
    return tuple(get_listed_document(storage, WorkerSpec, key) for key in storage.list(keys.payloads))


def delete_generation(storage: Storage, keys: Keys) -> None:
    """Delete all objects of one generation; its workers notice by their leases."""
    for key in storage.list(keys.prefix):
        storage.delete(key)
    storage.delete(keys.reservation)


def delete_all(storage: Storage, keys: Keys) -> None:
    """Delete all objects of the run."""
    for key in storage.list(keys.run_prefix):
        storage.delete(key)
