from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.errors import InvalidValue, KeyMissing
from funcpipe.platforms.base import OPEN, Gate
from funcpipe.platforms.catalog import open_storage
from funcpipe.platforms.local.throttle import BURST_S, Link, OwnPace, Pace, SharedPace, Throttled, link_of, read_link
from funcpipe.testing.memory_storage import MemoryStorage
from tests.platforms.local.test_limits import spec

MB = 1_000_000


class Clock:
    """Time that passes only in sleep."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Seen(MemoryStorage):
    """Notes when each request begins and when its object is written."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.written_s = 0.0

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        with gate:
            pass
        self.written_s = self.clock()
        super().put(key, data)


def link(clock: Clock, store: MemoryStorage | None = None) -> Throttled:
    return Throttled(
        store or MemoryStorage(),
        latency_s=0.04,
        upload=[OwnPace(10 * MB)],
        download=[OwnPace(20 * MB)],
        clock=clock,
        sleep=clock.sleep,
    )


def seconds(clock: Clock, work: Callable[[], object]) -> float:
    began_s = clock()
    work()
    return clock() - began_s


def test_an_operation_takes_its_latency_and_its_bytes_the_time_of_their_direction() -> None:
    clock = Clock()
    throttled = link(clock)
    assert seconds(clock, lambda: throttled.put("k", bytes(5 * MB))) == pytest.approx(0.04 + 0.5, abs=1.1 * BURST_S)
    assert seconds(clock, lambda: throttled.get("k")) == pytest.approx(0.04 + 0.25, abs=1.1 * BURST_S)
    assert seconds(clock, lambda: throttled.get("k", start=MB, stop=2 * MB)) == pytest.approx(0.09, abs=1.1 * BURST_S)
    assert seconds(clock, lambda: throttled.list("")) == pytest.approx(0.04)


def test_a_vain_get_takes_the_latency_and_tells_nothing_of_what_comes_meanwhile() -> None:
    clock = Clock()
    throttled = link(clock)
    with pytest.raises(KeyMissing):
        throttled.get("k")
    assert clock() == pytest.approx(100.04)


def test_an_object_is_there_when_its_last_byte_has_passed() -> None:
    clock = Clock()
    store = Seen(clock)
    link(clock, store).put("k", bytes(MB))
    assert store.written_s == pytest.approx(100.14, abs=1.1 * BURST_S)


def test_the_gate_is_held_from_the_end_of_the_latency_until_the_last_byte() -> None:
    clock = Clock()
    held: list[float] = []

    class Watched:
        def __enter__(self) -> None:
            held.append(clock())

        def __exit__(self, *_: object) -> None:
            held.append(clock())

    throttled = link(clock)
    throttled.put("k", bytes(MB), gate=Watched())
    throttled.get("k", gate=Watched())
    assert held == pytest.approx([100.04, 100.14, 100.18, 100.23], abs=3 * BURST_S)


@given(st.lists(st.tuples(st.integers(1, 3 * MB), st.floats(0, 0.05)), min_size=1, max_size=30))
def test_no_second_admits_more_than_the_rate_and_the_burst(work: list[tuple[int, float]]) -> None:
    rate, clock, passed = 10 * MB, Clock(), []
    pace = OwnPace(rate)
    for size, pause_s in work:
        clock.sleep(pause_s)
        clock.now_s = max(clock.now_s, pace.due_s(size, clock.now_s))
        passed.append((clock.now_s, size))
    for first_s, _ in passed:
        for last_s, _ in passed:
            between = sum(size for at_s, size in passed if first_s < at_s <= last_s)
            assert between <= rate * (max(last_s - first_s, 0) + BURST_S) * (1 + 1e-9)


@pytest.mark.parametrize("shared", [False, True])
def test_links_that_share_a_cap_share_its_rate(tmp_path: Path, shared: bool) -> None:
    clock = Clock()

    def pace() -> Pace:
        return SharedPace(10 * MB, tmp_path / "cap") if shared else OwnPace(10 * MB)

    one, other = pace(), pace()
    dues = [p.due_s(MB, clock()) for _ in range(5) for p in (one, other)]
    assert dues[-1] == pytest.approx(clock() + (1.0 if shared else 0.5), abs=1.1 * BURST_S)


def test_a_rate_must_be_positive() -> None:
    with pytest.raises(InvalidValue, match="bytes_s"):
        OwnPace(0)
    with pytest.raises(InvalidValue, match="latency_s"):
        Throttled(MemoryStorage(), latency_s=-1)


rates = st.floats(1, 1e12)


@given(
    link=st.builds(Link, latency_s=st.floats(0, 10), upload_bytes_s=rates, download_bytes_s=rates)
    | st.builds(
        Link,
        latency_s=st.floats(0, 10),
        upload_bytes_s=rates,
        download_bytes_s=rates,
        shared_bytes_s=rates,
        shared=st.text(min_size=1),
    ),
    url=st.sampled_from(["file:///tmp/a%20folder", "s3://bucket/prefix?endpoint=http://h:1&region=r"]),
)
def test_a_link_is_read_back_from_the_url_and_replaces_the_one_there_was(link: Link, url: str) -> None:
    there, _, fragment = link.on(url).partition("#")
    assert there == url
    assert read_link(fragment) == link
    other = Link(latency_s=0, upload_bytes_s=1, download_bytes_s=1)
    assert link.on(other.on(url)) == link.on(url)


def test_a_storage_opens_through_its_link(tmp_path: Path) -> None:
    link = Link(latency_s=0, upload_bytes_s=1e9, download_bytes_s=1e9, shared_bytes_s=1e9, shared=str(tmp_path))
    store = open_storage(link.on((tmp_path / "objects").as_uri()))
    assert isinstance(store, Throttled)
    store.put("k", b"12345678")
    assert store.get("k") == b"12345678"
    assert {path.name for path in tmp_path.iterdir()} == {"objects", "upload", "download"}


def test_functions_share_the_platform_s_cap() -> None:
    assert link_of(spec(), spec().sizes[0], "/f").shared is None
    capped = link_of(spec(shared_bytes_s=1e8), spec().sizes[0], "/f")
    assert (capped.shared_bytes_s, capped.shared) == (1e8, "/f")


@pytest.mark.parametrize(
    "fragment", ["x", "latency_s=1", "latency_s=a&upload_bytes_s=1&download_bytes_s=1", "shared=1"]
)
def test_a_fragment_that_tells_no_link_is_refused(fragment: str) -> None:
    with pytest.raises(InvalidValue, match="must read latency_s="):
        read_link(fragment)
