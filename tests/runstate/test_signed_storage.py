"""What lies in a run's storage is believed only if somebody with the run's key has written it, and as that object."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.client.control.status import status
from funcpipe.core import Halt, Heartbeat, RunRecord
from funcpipe.core.run_key import RunKey
from funcpipe.errors import CorruptMessage, KeyMissing, RunUnknown
from funcpipe.platforms.base import Storage
from funcpipe.platforms.catalog import open_platform
from funcpipe.runstate.documents import encode_document, find_readable_document, put_document
from funcpipe.runstate.generations import (
    find_record,
)
from funcpipe.runstate.keys import Keys, generation_of, is_message
from funcpipe.runstate.signing import OneKey, SignedStorage, signed
from funcpipe.testing.memory_storage import MemoryStorage
from tests.run_documents import BEAT
from tests.support.run_keys import NONCE, signed_for_tests

OTHER = RunKey("0bad" * 16)
KEYS = Keys("run-1", 0, NONCE)
KEY = KEYS.halt
ORDER = Halt(reason="enough")


class Claims:
    """A keyring that has one key for whatever there is, as somebody has who signs what is not theirs."""

    def find(self, keys: Keys) -> RunKey | None:
        return OTHER


def by_another(storage: Storage) -> Storage:
    """`storage` for somebody who may write to it, and has a key of their own alone."""
    return SignedStorage(storage, Claims())


def written(key: str, data: bytes) -> bytes:
    """`data` as somebody with the run's key puts it under `key`."""
    storage = MemoryStorage()
    signed_for_tests(storage).put(key, data)
    return storage.get(key)


def is_refused(data: bytes, key: str = KEY) -> bool:
    """Whether a function and a client both refuse `data` as what nobody of the run has written."""
    storage = MemoryStorage()
    storage.put(key, data)
    refusals = []
    for reader in (signed_for_tests(storage), signed(storage)):
        try:
            reader.get(key)
        except CorruptMessage as error:
            refusals.append(f"{key} is not signed by its run" in str(error))
    return refusals == [True, True]


def assert_refused(data: bytes, key: str = KEY) -> None:
    assert is_refused(data, key), (key, data)


FORGERIES: dict[str, Callable[[str, bytes], bytes]] = {
    "without a signature": lambda key, data: data,
    "with a checksum alone": lambda key, data: data + hashlib.sha256(data).hexdigest()[:56].encode() + b"\n",
    "with the signature of other bytes": lambda key, data: data + written(key, b"other bytes")[-57:],
    "with the signature of more": lambda key, data: data + written(key, data + b"\0")[-57:],
    "signed with another key": lambda key, data: forged(key, data),
    "signed twice": lambda key, data: written(key, data) + b"0" * 56 + b"\n",
}


def forged(key: str, data: bytes) -> bytes:
    storage = MemoryStorage()
    by_another(storage).put(key, data)
    return storage.get(key)


def objects_of(keys: Keys) -> tuple[str, ...]:
    """A key of each kind of object that is signed here."""
    return (
        keys.reservation,
        keys.record,
        keys.record_copy,
        keys.halt,
        keys.verdict(0),
        keys.bundle(0),
        keys.bundle(1),
        keys.parameters(0),
        keys.payload("s0.r0"),
        keys.payload("s0.r1"),
        keys.step_report(3, "s1.r0"),
        keys.step_report(4, "s1.r0"),
        keys.step_summary("s1.r0", 0, 4),
        keys.lease("s0.r0", 0),
        keys.lease("s0.r0", 1),
        keys.heartbeat("s0.r0", 0),
        keys.hand_over("s0.r0", 0),
        keys.restart("s0.r0", 0),
        keys.function("s0.r0", 0, "0a"),
        keys.worker_report("s0.r0", 0),
        keys.trace("s0.r0", 0),
        keys.done("s0.r0", 0, 0, 3),
        keys.checkpoint(0, "00000003.s0.r0.a00000000.json"),
        keys.checkpoint(0, "00000004.s0.r0.a00000000.json"),
        keys.checkpoint(1, "00000003.s0.r0.a00000000.json"),
    )


@given(st.binary(max_size=300), st.sampled_from(objects_of(KEYS)))
def test_whoever_has_the_key_reads_what_was_written(data: bytes, key: str) -> None:
    storage = MemoryStorage()
    signed_for_tests(storage).put(key, memoryview(data))
    assert signed_for_tests(storage).get(key) == signed(storage).get(key) == data
    assert storage.get(key).startswith(data)
    assert len(storage.get(key)) == len(data) + 57


def test_what_nobody_with_the_key_has_written_is_refused() -> None:
    believed = [
        f"{key}, {forgery}: {data!r}"
        for key, forgery, data in product(objects_of(KEYS), FORGERIES, (encode_document(ORDER), b"", b"\n"))
        if not is_refused(FORGERIES[forgery](key, data), key)
    ]
    assert believed == []


def test_every_changed_lost_or_added_byte_is_noticed() -> None:
    whole = written(KEY, encode_document(ORDER))
    for place in range(len(whole)):
        for wrong in (0x01, 0x20, 0x2A, 0x80):  # with 0x20 a hexadecimal digit is a capital one, and others blanks
            changed = bytearray(whole)
            changed[place] ^= wrong
            assert_refused(bytes(changed))
        assert_refused(whole[:place])
        assert_refused(whole[place + 1 :])
    for more in (b"\0", b"\n", b" ", whole):
        assert_refused(whole + more)
        assert_refused(more + whole)


@given(st.binary(max_size=80), st.integers(0), st.integers(0, 255), st.sampled_from(["change", "cut", "insert"]))
def test_any_damage_is_noticed(data: bytes, place: int, byte: int, damage: str) -> None:
    whole = written(KEY, data)
    place %= len(whole)
    kept = {"change": whole[place + 1 :], "cut": whole[place + 1 + byte :], "insert": whole[place:]}[damage]
    changed = whole[:place] + (b"" if damage == "cut" else bytes([byte])) + kept
    if changed != whole:
        assert_refused(changed)


def test_no_object_is_taken_for_another_of_the_same_run() -> None:
    keys = (*objects_of(KEYS), *objects_of(Keys("run-2", 0, NONCE)), *objects_of(Keys("run-1", 1, NONCE)))
    objects = {key: written(key, encode_document(ORDER)) for key in keys}
    for source, key in permutations(keys, 2):
        storage = MemoryStorage()
        storage.put(key, objects[source])
        with pytest.raises(CorruptMessage, match=f"{key} is not signed by its run"):
            signed_for_tests(storage).get(key)


def test_an_old_document_is_not_taken_for_a_later_one() -> None:
    """A heartbeat of the attempt before, and a loss of an earlier step."""
    storage = MemoryStorage()
    own = signed_for_tests(storage)
    put_document(own, KEYS.heartbeat("s0.r0", 0), replace(BEAT, attempt=0))
    storage.put(KEYS.heartbeat("s0.r0", 1), storage.get(KEYS.heartbeat("s0.r0", 0)))
    assert find_readable_document(own, Heartbeat, KEYS.heartbeat("s0.r0", 0)) is not None
    assert find_readable_document(own, Heartbeat, KEYS.heartbeat("s0.r0", 1)) is None


def test_objects_that_belong_to_no_generation_and_messages_are_as_they_are() -> None:
    storage = MemoryStorage()
    message = KEYS.message("s0.r0", 3, "put-activation")
    for key in (KEYS.owner.lease("client", 0), "_watch/run-1/g0000-0a", "stops/x", "probes/a/layer", message):
        signed_for_tests(storage).put(key, b"as it is")
        assert storage.get(key) == signed_for_tests(storage).get(key) == b"as it is"


def test_the_generation_of_an_object_is_told_by_its_key() -> None:
    for keys in (KEYS, Keys("g0001-0a", 12, "0a"), Keys("messages"), Keys("generations", 3, "ab" * 8)):
        for key in objects_of(keys):
            assert generation_of(key) == keys, key
            assert not is_message(key), key
        message = keys.message("s0.r0", 3, "put-activation")
        assert generation_of(message) == keys
        assert is_message(message)
        assert generation_of(keys.owner.lease("client", 0)) is None
        assert generation_of(keys.owner.owner_heartbeat(0, "ab")) is None


def test_what_is_not_there_is_missing_whoever_asks() -> None:
    with pytest.raises(KeyMissing):
        signed_for_tests(MemoryStorage()).get(KEY)
    with pytest.raises(KeyMissing):
        SignedStorage(MemoryStorage(), OneKey(OTHER)).get(KEY)
    with pytest.raises(RunUnknown):
        status(MemoryStorage(), "run-1", open_platform)
    assert find_record(signed(MemoryStorage()), KEYS) is None
    assert find_readable_document(signed(MemoryStorage()), RunRecord, KEYS.record) is None
