import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.comm.channel import Channel, Patience
from funcpipe.comm.codec import encode
from funcpipe.core import Wire
from funcpipe.errors import Cancelled, CorruptMessage, DeadlineExceeded, KeyMissing
from funcpipe.platforms.base import OPEN, Gate
from funcpipe.platforms.memory import MemoryStorage
from funcpipe.platforms.wrappers import Counted


def channel(store: object, deadline_s: float = 5.0, cancel: threading.Event | None = None) -> Channel:
    patience = Patience(deadline_s=deadline_s)
    return Channel(store, patience, cancel=cancel or threading.Event())  # type: ignore[arg-type]


def test_a_message_arrives_in_the_wire_format_or_exactly() -> None:
    store = MemoryStorage()
    values = torch.randn(100)
    sent = channel(store).put("a", {"x": values}, wire=Wire.BF16)
    exact = channel(store).put("b", {"x": values})
    received = channel(store).get("a")
    assert torch.equal(received.tensors["x"], values.bfloat16().float())
    assert received.payload_bytes == sent < exact
    assert torch.equal(channel(store).get("b").tensors["x"], values)


def test_a_message_that_comes_late_is_waited_for_and_the_wait_is_told() -> None:
    store = MemoryStorage()
    timer = threading.Timer(0.2, lambda: channel(store).put("a", {"x": torch.ones(1)}))
    timer.start()
    received = channel(store).get("a")
    timer.join()
    assert 0.1 < received.waited_s < 2
    assert received.tensors["x"].tolist() == [1]


def test_a_message_that_never_comes_ends_at_the_deadline_with_its_key() -> None:
    with pytest.raises(DeadlineExceeded, match=r"run-1/a0/00000003/put-split\.s0\.r1\.k0 has not come within 0\.05 s"):
        channel(MemoryStorage(), deadline_s=0.05).get("run-1/a0/00000003/put-split.s0.r1.k0")


def test_a_wait_ends_when_it_is_cancelled() -> None:
    cancel = threading.Event()
    threading.Timer(0.1, cancel.set).start()
    with pytest.raises(Cancelled, match="stopped waiting for a"):
        channel(MemoryStorage(), deadline_s=60, cancel=cancel).get("a")


def test_a_corrupt_message_is_named_by_its_key() -> None:
    store = MemoryStorage()
    store.put("a", b"nonsense of some length")
    with pytest.raises(CorruptMessage, match=r"^a: a message begins with"):
        channel(store).get("a")


def test_waiting_never_lists_and_counts_its_empty_gets() -> None:
    store = Counted(MemoryStorage())
    with pytest.raises(DeadlineExceeded):
        channel(store, deadline_s=0.05).get("a")
    assert store.traffic.gets == store.traffic.empty_gets > 0


@given(st.floats(0, 100), st.floats(0, 100), st.floats(0.01, 100))
def test_pauses_stay_within_their_bounds(waited_s: float, due_s: float, deadline_s: float) -> None:
    patience = Patience(deadline_s=deadline_s)
    pause_s = patience.pause_s(waited_s, due_s)
    assert 0 <= pause_s <= max(patience.most_s, due_s - waited_s, patience.least_s)
    assert waited_s + pause_s <= max(deadline_s, waited_s)
    if waited_s >= due_s:
        assert pause_s <= max(patience.least_s, patience.due_share * due_s, patience.late_share * waited_s)


class Clock:
    """Time that passes only in pauses; the object 'step/m' appears `arrives_s` after each wait begins."""

    def __init__(self, cancel: threading.Event) -> None:
        self.now_s = 0.0
        cancel.wait = self.pause  # type: ignore[method-assign]

    def __call__(self) -> float:
        return self.now_s

    def pause(self, timeout: float | None = None) -> bool:
        self.now_s += timeout or 0.0
        return False


class Arriving(MemoryStorage):
    def __init__(self, clock: Clock, arrives_s: float) -> None:
        super().__init__()
        self.clock, self.arrives_s = clock, arrives_s
        self.message = bytes(encode({"x": torch.ones(1)}))

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        if self.clock.now_s < self.arrives_s:
            raise KeyMissing(key)
        return self.message


@given(st.floats(0.001, 20), st.floats(0, 0.1))
def test_steady_arrivals_are_awaited_with_few_vain_requests_and_little_delay(wait_s: float, jitter: float) -> None:
    cancel = threading.Event()
    clock = Clock(cancel)
    store = Arriving(clock, 0.0)
    counted = Counted(store)
    steady = Channel(counted, Patience(deadline_s=60), cancel=cancel, clock=clock)
    for step in range(12):
        vain = counted.traffic.empty_gets
        lasts_s = wait_s * (1 + jitter * (step % 2))
        store.arrives_s = clock.now_s + lasts_s
        received = steady.get(f"run/{step}/m")
        assert received.waited_s >= lasts_s
        if step >= 4:
            assert received.waited_s <= lasts_s * 1.05 + 0.0006
            assert counted.traffic.empty_gets - vain <= 20 + 0.4 * lasts_s / 0.05
