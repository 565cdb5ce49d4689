"""Documents that arrive damaged, or late, are read again; what anybody wrote to storage is found and deleted."""

import json
import logging

import pytest

from funcpipe.core import Halt, HandOver, worker_name
from funcpipe.core.json_form import to_plain
from funcpipe.errors import CorruptMessage, KeyMissing, PlatformError, RunUnknown, StorageError
from funcpipe.platforms.base import OPEN, Gate, Handle
from funcpipe.platforms.function_group import stop_functions
from funcpipe.runstate.documents import (
    READS,
    decode_document,
    encode_document,
    get_document,
    get_listed_document,
    put_document,
)
from funcpipe.runstate.functions import list_functions, start_function
from funcpipe.runstate.generations import (
    delete_generation,
    delete_objects,
    list_generations,
    newest_record,
    reserve_generation,
)
from funcpipe.runstate.halt import halt_run, read_halt
from funcpipe.runstate.keys import Keys
from funcpipe.testing.memory_storage import MemoryStorage
from tests.core.test_run import spec
from tests.recording import Recording

KEYS = Keys("run-1")
KEY = KEYS.hand_over("s0.r0", 0)


class Unreliable(MemoryStorage):
    """The first reads of each object do not find it, or find it damaged."""

    def __init__(self, *, missing: int = 0, damaged: int = 0) -> None:
        super().__init__()
        self.missing, self.damaged = missing, damaged

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        data = super().get(key, start=start, stop=stop, gate=gate)
        if self.missing:
            self.missing -= 1
            raise KeyMissing(key)
        if self.damaged:
            self.damaged -= 1
            return data[:-3]
        return data


def test_a_damaged_document_is_read_again_and_that_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    storage = Unreliable(damaged=READS - 1)
    put_document(storage, KEY, HandOver(step=3))
    with caplog.at_level(logging.WARNING, logger="funcpipe"):
        assert get_document(storage, HandOver, KEY) == HandOver(step=3)
    assert f"read 1 of {READS} is damaged, reading again: {KEY}: wrong checksum" in caplog.text
    storage.damaged = READS
    with pytest.raises(CorruptMessage, match=f"{KEY}: wrong checksum"):
        get_document(storage, HandOver, KEY)


def test_a_listed_document_that_a_read_does_not_find_is_read_again() -> None:
    storage = Unreliable(missing=READS - 1)
    put_document(storage, KEY, HandOver(step=3))
    assert get_listed_document(storage, HandOver, KEY) == HandOver(step=3)
    storage.missing = READS
    with pytest.raises(KeyMissing):
        get_listed_document(storage, HandOver, KEY)


def test_a_document_of_another_kind_is_refused() -> None:
    with pytest.raises(CorruptMessage, match="here"):
        decode_document(Halt, encode_document(HandOver(step=3)), source="here")


def test_the_first_order_to_end_counts() -> None:
    storage = MemoryStorage()
    assert read_halt(storage, KEYS) is None
    first = Halt(reason="too expensive", step=7)
    assert halt_run(storage, KEYS, first) == first
    assert halt_run(storage, KEYS, Halt(reason="too late", step=9)) == first
    assert read_halt(storage, KEYS) == first


class Forgetful(MemoryStorage):
    """Objects are deleted between a list and the read that follows."""

    def list(self, prefix: str) -> tuple[str, ...]:
        keys = super().list(prefix)
        for key in keys:
            self.delete(key)
        return keys


def test_functions_are_found_by_anybody_unless_they_are_deleted_meanwhile() -> None:
    storage, platform = MemoryStorage(), Recording()
    begun = start_function(platform, storage, KEYS, spec())
    assert list_functions(storage, KEYS) == (begun,)
    assert list_functions(storage, KEYS, spec().worker) == (begun,)
    assert list_functions(storage, KEYS, worker_name(7, 7)) == ()
    gone = Forgetful()
    start_function(platform, gone, KEYS, spec())
    assert list_functions(gone, KEYS) == ()
    assert json.loads(json.dumps(to_plain(begun.handle)))["name"] == "function 1"


class Closed(MemoryStorage):
    """Takes nothing."""

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        raise StorageError("no")


class Stopping(Recording):
    """Notes what it is told to stop."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped: list[str] = []

    def stop(self, handle: Handle) -> None:
        self.stopped.append(handle.name)


def test_a_function_that_cannot_be_recorded_is_stopped() -> None:
    platform = Stopping()
    with pytest.raises(StorageError):
        start_function(platform, Closed(), KEYS, spec())
    assert platform.stopped == ["function 1"]


class Deaf(Recording):
    """Knows none of the functions that it is told to stop."""

    def stop(self, handle: Handle) -> None:
        raise PlatformError(f"no such function: {handle.name}")


def test_a_function_that_its_platform_has_forgotten_counts_as_stopped(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="funcpipe"):
        stop_functions(Deaf(), [Handle(worker="s0.r0", name="f")])
    assert "function f of worker s0.r0 may still run and cost money: no such function: f" in caplog.text


def test_generations_are_reserved_listed_and_deleted(caplog: pytest.LogCaptureFixture) -> None:
    storage = MemoryStorage()
    first, second = reserve_generation(storage, "run-1"), reserve_generation(storage, "run-1")
    storage.put(first.message("s0.r0", 0, "put"), b"1")
    storage.put(second.message("s0.r0", 0, "put"), b"2")
    assert list_generations(storage, "run-1") == (first, second)
    assert (first.generation, second.generation) == (0, 1)
    with caplog.at_level(logging.DEBUG, logger="funcpipe"), pytest.raises(RunUnknown):
        newest_record(storage, "run-1")
    assert "generation 1 of run run-1 has no record" in caplog.text
    delete_generation(storage, first)
    assert list_generations(storage, "run-1") == (second,)
    assert storage.list(first.prefix) == ()
    assert len(delete_objects(storage, "run-1").own) == 2
    assert storage.list("") == ()
