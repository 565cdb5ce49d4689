import itertools
import logging
import random
import re
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.comm.arrival_estimator import ArrivalEstimator
from funcpipe.comm.channel import Channel
from funcpipe.comm.codec import encode
from funcpipe.comm.signature import Signature
from funcpipe.core import Wire
from funcpipe.errors import Cancelled, CorruptMessage, DeadlineExceeded, KeyMissing
from funcpipe.platforms.base import OPEN, Gate
from funcpipe.platforms.wrappers import Counted
from funcpipe.testing.memory_storage import MemoryStorage
from tests.support.run_keys import RUN_KEY
from tests.support.waiting import LONG_S


def channel(store: object, deadline_s: float = 5.0, cancel: threading.Event | None = None) -> Channel:
    estimator = ArrivalEstimator(deadline_s=deadline_s)
    return Channel(store, estimator, run_key=RUN_KEY, cancel=cancel or threading.Event())  # type: ignore[arg-type]


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
    clock = Clock()
    estimator = ArrivalEstimator(deadline_s=5.0)
    awaited = Channel(Arriving(clock, 0.2), estimator, run_key=RUN_KEY, cancel=threading.Event(), clock=clock)
    received = awaited.get("a")
    assert received.waited_s == clock.now_s
    assert 0.2 <= received.waited_s < 0.4
    assert received.tensors["x"].tolist() == [1]


def test_a_message_that_a_storage_tells_of_is_read_at_once() -> None:
    class Watched(Arriving):
        """Tells when the object is there."""

        watches = True

        def wait(self, key: str, timeout_s: float, cancel: threading.Event) -> None:
            self.clock.now_s = min(self.clock.now_s + timeout_s, self.arrives_s)

    clock = Clock()
    estimator = ArrivalEstimator(deadline_s=5.0)
    told = Channel(Watched(clock, 0.2), estimator, run_key=RUN_KEY, cancel=threading.Event(), clock=clock)
    assert told.get("a").waited_s == 0.2


def test_a_message_that_never_comes_ends_at_the_deadline_with_its_key() -> None:
    with pytest.raises(DeadlineExceeded, match=r"run-1/a0/00000003/put-split\.s0\.r1\.k0 has not come within 0\.05 s"):
        channel(MemoryStorage(), deadline_s=0.05).get("run-1/a0/00000003/put-split.s0.r1.k0")


def test_deadlines_count_afresh_for_each_function_that_is_started_and_end_without_one() -> None:
    now, starts = [0.0], {7.0: "s1.r0 attempt 1", 14.0: "s2.r0 attempt 1"}

    class Watch(MemoryStorage):
        """An empty storage in which waiting takes exactly as long as it is allowed to."""

        def wait(self, key: str, seconds: float, cancel: threading.Event) -> None:
            now[0] += seconds

    waiting = Channel(
        Watch(),
        ArrivalEstimator(deadline_s=10),
        run_key=RUN_KEY,
        cancel=threading.Event(),
        clock=lambda: now[0],
        started=lambda: ["s0.r0 attempt 0", *(name for at_s, name in starts.items() if at_s <= now[0])],
    )
    with pytest.raises(DeadlineExceeded, match="put-split has not come within 10 s"):
        waiting.get("run-1/a0/00000003/put-split")
    assert now[0] == 30  # looked at after 10 s, 20 s and 30 s: something new, something new, nothing


def test_a_wait_ends_when_it_is_cancelled() -> None:
    cancel = threading.Event()

    class Cancelling(MemoryStorage):
        """An empty storage in which the wait is cancelled once it has begun."""

        def wait(self, key: str, timeout_s: float, cancel: threading.Event) -> None:
            threading.Timer(0.01, cancel.set).start()
            super().wait(key, timeout_s, cancel)

    with pytest.raises(Cancelled, match="stopped waiting for a"):
        channel(Cancelling(), deadline_s=60, cancel=cancel).get("a")


def test_a_corrupt_message_is_named_by_its_key() -> None:
    store = MemoryStorage()
    store.put("a", b"nonsense of some length that a message could have")
    with pytest.raises(CorruptMessage, match=r"^a: a message begins with"):
        channel(store).get("a")


def test_waiting_never_lists_and_counts_its_empty_gets() -> None:
    store = Counted(MemoryStorage())
    with pytest.raises(DeadlineExceeded):
        channel(store, deadline_s=0.05).get("a")
    assert store.traffic.gets == store.traffic.empty_gets > 0


def test_storage_that_tells_of_new_objects_is_not_asked_before_they_come() -> None:
    store = Counted(MemoryStorage())
    reader = channel(store)
    reading = threading.Thread(target=lambda: reader.get("a"))
    reading.start()
    channel(store).put("a", {"x": torch.ones(1)})
    reading.join(LONG_S)
    assert (store.traffic.gets, store.traffic.empty_gets) == (1, 0)


def test_what_is_there_is_read_however_late_the_reader_is_served() -> None:
    store = MemoryStorage()
    channel(store).put("a", {"x": torch.ones(1)})
    now_s = itertools.count(0.0, 10.0)
    late = Channel(
        store, ArrivalEstimator(deadline_s=1), run_key=RUN_KEY, cancel=threading.Event(), clock=lambda: next(now_s)
    )
    assert torch.equal(late.get("a").tensors["x"], torch.ones(1))


class Clock:
    """Time that passes only in pauses."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Arriving(MemoryStorage):
    """Whatever is asked for appears at `arrives_s`, of which it does not tell."""

    watches = False

    def __init__(self, clock: Clock, arrives_s: float) -> None:
        super().__init__()
        self.clock, self.arrives_s = clock, arrives_s

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        if self.clock.now_s < self.arrives_s:
            raise KeyMissing(key)
        return bytes(encode({"x": torch.ones(1)}, proof=Signature(RUN_KEY, key)))

    def wait(self, key: str, timeout_s: float, cancel: threading.Event) -> None:
        self.clock.now_s += timeout_s


@given(st.floats(0.01, 20), st.floats(0, 0.1), st.integers(0, 2**32))
def test_steady_arrivals_are_awaited_with_few_vain_requests_and_little_delay(
    wait_s: float, jitter: float, seed: int
) -> None:
    varies = random.Random(seed)
    clock = Clock()
    store = Arriving(clock, 0.0)
    counted = Counted(store)
    steady = Channel(counted, ArrivalEstimator(deadline_s=60), run_key=RUN_KEY, cancel=threading.Event(), clock=clock)
    vain, late_s = [], []
    for step in range(100):
        before = counted.traffic.empty_gets
        lasts_s = wait_s * (1 + jitter * varies.random())
        store.arrives_s = clock.now_s + lasts_s
        steady.begin_step()
        received = steady.get(f"run/{step}/m")
        vain.append(counted.traffic.empty_gets - before)
        late_s.append(received.waited_s - lasts_s)
    assert min(late_s) >= 0
    assert sum(vain[10:]) <= 2 * len(vain[10:])
    assert sum(late_s[4:]) / len(late_s[4:]) <= 0.1 * wait_s + 0.001


def test_what_comes_earlier_than_it_used_to_is_soon_expected_then() -> None:
    clock = Clock()
    store = Arriving(clock, 0.0)
    steady = Channel(store, ArrivalEstimator(deadline_s=60), run_key=RUN_KEY, cancel=threading.Event(), clock=clock)
    waited_s = []
    for step in range(30):
        store.arrives_s = clock.now_s + (10.0 if step < 8 else 1.0)
        steady.begin_step()
        waited_s.append(steady.get(f"run/{step}/m").waited_s)
    assert waited_s[7] < 10.8
    assert waited_s[-1] < 1.2


def test_a_message_far_later_than_expected_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="funcpipe.comm.channel")
    clock = Clock()
    store = Arriving(clock, 0.0)
    slow = Channel(store, ArrivalEstimator(deadline_s=60), run_key=RUN_KEY, cancel=threading.Event(), clock=clock)
    for step, lasts_s in enumerate([12.0, 1.0, 1.0, 1.0, 4.0, 30.0]):
        store.arrives_s = clock.now_s + lasts_s
        slow.begin_step()
        slow.get(f"run/{step}/m")
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    first, last = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(r"run/0/m was slow: waited 1[2-9]\.. s for it, with nothing known of when it comes", first)
    assert re.fullmatch(r"run/5/m was slow: waited 3[0-9]\.. s for it, expected [1-4]\.. s", last)


def test_a_message_that_arrives_damaged_is_read_again_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Damaging(MemoryStorage):
        reads = 0

        def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
            data = bytearray(super().get(key, start=start, stop=stop, gate=gate))
            data[-1] ^= self.reads < 2
            self.reads += 1
            return bytes(data)

    store = Damaging()
    channel(store).put("a", {"x": torch.ones(16)})
    assert channel(store).get("a").tensors["x"].tolist() == [1] * 16
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    said = "reading again what arrived damaged: a: a message of 192 bytes is not as it was written"
    assert caplog.messages[0].startswith(said)


def test_a_first_step_in_which_all_is_late_does_not_make_the_others_late() -> None:
    clock = Clock()
    store = Arriving(clock, 0.0)
    steady = Channel(store, ArrivalEstimator(deadline_s=60), run_key=RUN_KEY, cancel=threading.Event(), clock=clock)
    waited_s = []
    for step in range(6):
        store.arrives_s = clock.now_s + (5.0 if step == 0 else 1.0)
        steady.begin_step()
        waited_s.append(steady.get(f"run/{step}/m").waited_s)
    assert max(waited_s[1:]) < 1.2


def test_bodies_move_one_at_a_time_while_requests_wait_side_by_side() -> None:
    moving, most = [0], [0]
    lock = threading.Lock()
    entered = threading.Condition(lock)
    ready = threading.Barrier(3, timeout=LONG_S)

    class Slow(MemoryStorage):
        def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
            ready.wait()  # passes once three requests are open
            with gate:
                with lock:
                    moving[0] += 1
                    most[0] = max(most[0], moving[0])
                    entered.notify_all()
                    entered.wait_for(lambda: moving[0] > 1, timeout=0.01)  # nobody comes, however long one waits
                with lock:
                    moving[0] -= 1
            return super().get(key)

    store = Slow()
    channel(store).put("a", {"x": torch.ones(1)})
    shared = channel(store)
    threads = [threading.Thread(target=shared.get, args=("a",)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] == 1
