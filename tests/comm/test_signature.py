"""A message of a run passes only as what it was written as: by whom, under which key, at which place in the object."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from funcpipe.comm.arrival_estimator import ArrivalEstimator
from funcpipe.comm.channel import Channel
from funcpipe.comm.codec import decode, encode, message_bytes
from funcpipe.comm.signature import CHECKSUM, PROOF_BYTES, Proof, Signature
from funcpipe.core.run_key import RunKey
from funcpipe.errors import CorruptMessage
from funcpipe.runstate.keys import Keys
from funcpipe.testing.memory_storage import MemoryStorage
from tests.support.run_keys import NONCE, RUN_KEY

OTHER = RunKey("0bad" * 16)
KEYS = Keys("run-1", 0, NONCE)
KEY = KEYS.message("s0.r0", 3, "put-activation.s0.r0.m0.k0")
MESSAGE = {"x": torch.arange(16.0)}
OLD = bytes(encode({"x": torch.zeros(16)}))
"""A message with a checksum alone, as all were before runs had keys; anybody can make it."""


def channel(storage: MemoryStorage, run_key: RunKey = RUN_KEY) -> Channel:
    return Channel(storage, ArrivalEstimator(deadline_s=5.0), run_key=run_key, cancel=threading.Event())


def sent(key: str = KEY, run_key: RunKey = RUN_KEY) -> bytes:
    """MESSAGE, as somebody with `run_key` puts it under `key`."""
    storage = MemoryStorage()
    channel(storage, run_key).put(key, MESSAGE)
    return storage.get(key)


def assert_refused(data: bytes, key: str = KEY) -> None:
    storage = MemoryStorage()
    storage.put(key, data)
    with pytest.raises(CorruptMessage, match=f"^{key}: "):
        channel(storage).get(key)


@given(st.binary(max_size=100), st.integers(0, 1 << 40))
def test_a_signature_holds_for_its_bytes_key_name_and_offset_alone(data: bytes, offset: int) -> None:
    view, signature = memoryview(data), Signature(RUN_KEY, "a")
    proof = signature.of(view, offset)
    assert len(proof) == PROOF_BYTES
    assert signature.holds(proof, view, offset)
    assert Signature(RUN_KEY, "a").holds(proof, view, offset)
    assert not signature.holds(proof, view, offset + 1)
    assert not signature.holds(proof, memoryview(data + b"\0"), offset)
    assert not Signature(RUN_KEY, "b").holds(proof, view, offset)
    assert not Signature(OTHER, "a").holds(proof, view, offset)
    assert not signature.holds(CHECKSUM.of(view, offset), view, offset)
    assert signature.of(view, offset) != proof  # a nonce is drawn anew


@given(st.binary(min_size=1, max_size=100), st.integers(0), st.integers(1, 255))
def test_a_signature_with_any_wrong_byte_does_not_hold(data: bytes, place: int, wrong: int) -> None:
    signature = Signature(RUN_KEY, "a")
    proof = signature.of(memoryview(data), 0)
    for number in range(PROOF_BYTES):
        changed = bytearray(proof)
        changed[number] ^= wrong
        assert not signature.holds(bytes(changed), memoryview(data), 0)
    text = bytearray(data)
    text[place % len(data)] ^= wrong
    assert not signature.holds(proof, memoryview(text), 0)


@pytest.mark.parametrize("proof", [CHECKSUM, Signature(RUN_KEY, "a")], ids=["checksum", "signature"])
def test_every_changed_lost_or_added_byte_of_a_message_is_noticed(proof: Proof) -> None:
    message = bytes(encode({"a": torch.arange(7), "b": torch.zeros(())}, proof=proof))
    assert decode(message, proof=proof)["a"].tolist() == list(range(7))
    for place in range(len(message)):
        changed = bytearray(message)
        changed[place] ^= 0x10
        with pytest.raises(CorruptMessage):
            decode(changed, proof=proof)
        with pytest.raises(CorruptMessage):
            decode(message[:place], proof=proof)
    with pytest.raises(CorruptMessage):
        decode(message + b"\0", proof=proof)


@pytest.mark.parametrize("planted", [OLD, sent(run_key=OTHER)], ids=["a checksum alone", "another run's key"])
def test_a_message_that_nobody_with_the_run_s_key_has_written_is_refused(planted: bytes) -> None:
    assert_refused(planted)


@pytest.mark.parametrize(
    "source",
    [
        KEYS.message("s0.r0", 2, "put-activation.s0.r0.m0.k0"),
        KEYS.message("s0.r0", 3, "put-activation.s0.r0.m1.k0"),
        KEYS.message("s0.r1", 3, "put-activation.s0.r0.m0.k0"),
        Keys("run-2", 0, NONCE).message("s0.r0", 3, "put-activation.s0.r0.m0.k0"),
        Keys("run-1", 1, NONCE).message("s0.r0", 3, "put-activation.s0.r0.m0.k0"),
    ],
    ids=["an earlier step", "another micro-batch", "another worker", "another run", "another generation"],
)
def test_a_message_is_not_taken_for_another(source: str) -> None:
    assert_refused(sent(source))


def series(key: str = KEY) -> tuple[MemoryStorage, int]:
    """Two messages of one size in an object, as replicas send each other chunks of gradients; the size."""
    storage = MemoryStorage()
    first, second = {"piece": torch.full((16,), 1.0)}, {"piece": torch.full((16,), 2.0)}
    channel(storage).put_series(key, [first, second])
    return storage, message_bytes(first)


def test_a_part_of_an_object_is_not_taken_for_another_part() -> None:
    storage, size = series()
    whole = storage.get(KEY)
    assert channel(storage).get(KEY, start=size, stop=2 * size).tensors["piece"].tolist() == [2.0] * 16
    storage.put(KEY, whole[size:] + whole[:size])
    for start in (0, size):
        with pytest.raises(CorruptMessage, match=f"^{KEY}: "):
            channel(storage).get(KEY, start=start, stop=start + size)
    with pytest.raises(CorruptMessage, match=f"^{KEY}: "):
        channel(storage).get_series(KEY, [size, size], [{"piece": torch.empty(16)}, {"piece": torch.empty(16)}])
    storage.put(KEY, whole[:size] * 2)
    with pytest.raises(CorruptMessage, match=f"^{KEY}: "):
        channel(storage).get_series(KEY, [size, size], [{"piece": torch.empty(16)}, {"piece": torch.empty(16)}])


@pytest.mark.parametrize("planted", [bytes(encode(MESSAGE)), sent(run_key=OTHER)], ids=["a checksum", "another key"])
def test_who_finds_its_message_written_already_believes_only_its_own_run(planted: bytes) -> None:
    """The tensors are the right ones; but a reader would refuse the message."""
    storage = MemoryStorage()
    storage.put(KEY, planted)
    with pytest.raises(CorruptMessage, match=r"has put .* with other bits"):
        channel(storage).put(KEY, MESSAGE)
    storage.put(KEY, sent())
    assert channel(storage).put(KEY, MESSAGE) == message_bytes(MESSAGE)
    assert torch.equal(channel(storage).get(KEY).tensors["x"], MESSAGE["x"])


def test_tensors_of_a_refused_message_are_not_touched() -> None:
    storage, target = MemoryStorage(), Tensor([7.0] * 16)
    storage.put(KEY, OLD)
    with pytest.raises(CorruptMessage):
        channel(storage).get(KEY, into={"x": target})
    assert target.tolist() == [7.0] * 16
