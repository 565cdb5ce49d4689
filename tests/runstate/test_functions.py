"""The handles of a run's functions: each is an object of its own, and those of many are read as one."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from funcpipe.platforms.base import RequestMeter
from funcpipe.platforms.function_group import StartedFunction
from funcpipe.platforms.wrappers import Counted
from funcpipe.runstate import functions
from funcpipe.runstate.documents import READS, get_document
from funcpipe.runstate.functions import StartedTogether, list_functions, record_together, start_function
from funcpipe.runstate.generations import is_written
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.signing import signed
from funcpipe.runstate.snapshot import Snapshot
from funcpipe.testing.memory_storage import MemoryStorage
from tests.client.seen_run import SeenRun
from tests.core.test_run import spec
from tests.recording import Recording

KEYS = Keys("run-1")


def started(storage: MemoryStorage, *replicas: int, attempt: int = 0) -> list[StartedFunction]:
    """Start a function for each of these replicas, as a client does."""
    specs = [replace(spec(), stage=0, replica=replica, attempt=attempt) for replica in replicas]
    platform = Recording()
    return [start_function(platform, storage, KEYS, own) for own in specs]


def listed(storage: MemoryStorage, gets: int) -> list[StartedFunction]:
    """The functions of the run as they are listed, which must take one listing and so many reads."""
    meter = RequestMeter()
    found = list_functions(Counted(storage, meter), KEYS)
    assert (meter.counts.lists, meter.counts.gets) == (1, gets)
    return list(found)


def by_place(found: list[StartedFunction]) -> list[StartedFunction]:
    return sorted(found, key=lambda function: (function.worker, function.attempt, function.started_at_s))


@pytest.mark.parametrize("count", [functions.MANY + 1, 60])
def test_handles_of_many_are_one_read_and_later_ones_one_each(count: int) -> None:
    storage = MemoryStorage()
    first = started(storage, *range(count))
    assert listed(storage, gets=count) == by_place(first)
    record_together(storage, KEYS, first)
    assert listed(storage, gets=1) == by_place(first)
    later = started(storage, 3, 5, attempt=1) + started(storage, 3, attempt=1)
    assert listed(storage, gets=1 + 3) == by_place([*first, *later])
    assert list_functions(storage, KEYS, "s0.r3") == tuple(by_place([first[3], later[0], later[2]]))


def test_handles_of_few_are_not_written_twice() -> None:
    storage = MemoryStorage()
    first = started(storage, *range(functions.MANY))
    before = storage.list("")
    record_together(storage, KEYS, first)
    assert storage.list("") == before


def test_what_a_client_that_died_had_started_is_found_without_the_object_of_all() -> None:
    storage = MemoryStorage()
    first = started(storage, *range(40))
    record_together(storage, KEYS, first[:30])  # others were started by whoever came later
    assert listed(storage, gets=1 + 10) == by_place(first)
    storage.delete(KEYS.started_together)
    assert listed(storage, gets=40) == by_place(first)


def lost(storage: MemoryStorage) -> None:
    storage.put(KEYS.started_together, b"damaged")


def foreign(storage: MemoryStorage) -> None:
    storage.put(KEYS.started_together, storage.get(storage.list(KEYS.functions)[0]))


@pytest.mark.parametrize("damage", [lost, foreign])
def test_handles_are_read_one_by_one_if_their_common_object_is_damaged(damage: Callable[[MemoryStorage], None]) -> None:
    storage = MemoryStorage()
    first = started(storage, *range(20))
    record_together(storage, KEYS, first)
    damage(storage)
    assert listed(storage, gets=READS + 20) == by_place(first)


def test_a_handle_that_was_deleted_is_not_listed() -> None:
    storage = MemoryStorage()
    first = started(storage, *range(20))
    record_together(storage, KEYS, first)
    storage.delete(KEYS.function("s0.r7", 0, first[7].token))
    assert listed(storage, gets=1) == by_place(first[:7] + first[8:])


def test_the_common_object_belongs_to_the_run_and_is_read_in_a_snapshot() -> None:
    assert is_written(KEYS.started_together)
    run = SeenRun(replicas=20)
    for replica in range(20):
        run.start(f"s0.r{replica}")
    found = list_functions(run.storage, run.keys)
    record_together(run.storage, run.keys, found)
    meter = RequestMeter()
    snapshot = Snapshot(signed(Counted(run.raw, meter)))
    assert list_functions(snapshot, run.keys) == list_functions(snapshot, run.keys) == found
    assert (meter.counts.lists, meter.counts.gets) == (1, 1)
    assert get_document(run.storage, StartedTogether, run.keys.started_together).functions == found
