"""One suite for every storage back-end."""

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from funcpipe.errors import KeyExists, KeyMissing
from funcpipe.platforms.aliyun.oss import OssStorage
from funcpipe.platforms.base import Storage
from funcpipe.platforms.catalog import open_storage
from funcpipe.platforms.local.files import FileStorage
from funcpipe.platforms.local.throttle import OwnPace, Throttled
from funcpipe.platforms.wrappers import Counted
from funcpipe.testing.memory_storage import MemoryStorage
from tests.contract.conftest import S3Server
from tests.contract.oss_server import ACCESS_KEY, REGION, SECRET_KEY, OssServer

BACK_ENDS: dict[str, Callable[[Path], Storage]] = {
    "memory": lambda folder: MemoryStorage(),
    "files": FileStorage,
    "counted files": lambda folder: Counted(FileStorage(folder)),
    "throttled memory": lambda folder: Throttled(MemoryStorage(), latency_s=0.0001, upload=[OwnPace(1e9)]),
}

keys = (
    st.lists(st.text("abcXYZ0189-_.", min_size=1, max_size=8), min_size=1, max_size=3)
    .map("/".join)
    .filter(lambda key: not any(part.strip(".") == "" for part in key.split("/")))
)


SERVERS = {"s3 on moto": "moto_server", "s3 on a real server": "real_s3_server"}


@pytest.fixture(params=[*BACK_ENDS, *SERVERS, "oss"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    if request.param in BACK_ENDS:
        return BACK_ENDS[request.param](tmp_path / "objects")
    if request.param == "oss":
        oss_server: OssServer = request.getfixturevalue("oss_server")
        monkeypatch.setenv("OSS_ACCESS_KEY_ID", ACCESS_KEY)
        monkeypatch.setenv("OSS_ACCESS_KEY_SECRET", SECRET_KEY)
        return OssStorage(
            "funcpipe-contract", secrets.token_hex(8), endpoint=oss_server.endpoint, region=REGION, path_style=True
        )
    server: S3Server = request.getfixturevalue(SERVERS[request.param])
    server.use(monkeypatch)
    server.make_bucket("funcpipe-contract")
    return open_storage(f"s3://funcpipe-contract/{secrets.token_hex(8)}?endpoint={server.endpoint}")


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(key=keys, data=st.binary(max_size=300), start=st.integers(0, 310), length=st.integers(0, 310))
def test_what_was_put_is_got_whole_and_in_ranges(
    store: Storage, key: str, data: bytes, start: int, length: int
) -> None:
    store.put(key, data)
    assert store.get(key) == data
    assert store.get(key, start=start) == data[start:]
    assert store.get(key, start=start, stop=start + length) == data[start : start + length]
    store.delete(key)


def test_a_missing_object_is_an_error_that_names_it(store: Storage) -> None:
    with pytest.raises(KeyMissing, match="'run/nothing'"):
        store.get("run/nothing")
    store.put("run/a/b", b"1")
    with pytest.raises(KeyMissing, match="'run/a'"):
        store.get("run/a")


def test_a_memoryview_is_written_as_its_bytes(store: Storage) -> None:
    store.put("k", memoryview(bytearray(b"abcd"))[1:3])
    assert store.get("k") == b"bc"


def test_put_replaces_unless_told_not_to(store: Storage) -> None:
    store.put("k", b"1")
    store.put("k", b"22")
    assert store.get("k") == b"22"
    with pytest.raises(KeyExists, match="'k'"):
        store.put("k", b"333", if_absent=True)
    assert store.get("k") == b"22"
    store.put("new", b"1", if_absent=True)
    assert store.get("new") == b"1"


def test_of_many_conditional_puts_one_succeeds(store: Storage) -> None:
    won: list[int] = []

    def put(number: int) -> None:
        try:
            store.put("lease", str(number).encode(), if_absent=True)
        except KeyExists:
            return
        won.append(number)

    in_threads([lambda n=n: put(n) for n in range(16)])  # type: ignore[misc]
    assert len(won) == 1
    assert store.get("lease") == str(won[0]).encode()


def test_delete_is_repeatable_and_list_is_by_prefix(store: Storage) -> None:
    for key in ("run-1/b", "run-1/a/x", "run-10/a", "other"):
        store.put(key, b"")
    assert store.list("run-1/") == ("run-1/a/x", "run-1/b")
    assert store.list("run-1") == ("run-1/a/x", "run-1/b", "run-10/a")
    assert store.list("") == ("other", "run-1/a/x", "run-1/b", "run-10/a")
    for _ in range(2):
        store.delete("run-1/a/x")
    assert store.list("run-1/") == ("run-1/b",)
    assert store.list("nowhere/") == ()


def test_readers_see_all_of_an_object_or_none_of_it(store: Storage) -> None:
    bodies = [bytes([value]) * 200_000 for value in range(4)]
    store.put("k", bodies[0])
    stop = threading.Event()
    seen: set[bytes] = set()

    def read() -> None:
        while not stop.is_set():
            seen.add(store.get("k"))

    def write() -> None:
        for _ in range(25):
            for body in bodies:
                store.put("k", body)
        stop.set()

    in_threads([read, read, write])
    assert seen <= set(bodies)


def test_the_gate_is_held_while_the_body_moves(store: Storage) -> None:
    passed: list[str] = []

    @contextmanager
    def gate(name: str) -> Iterator[None]:
        passed.append(f"{name} in")
        yield
        passed.append(f"{name} out")

    store.put("k", b"1", gate=gate("put"))
    store.get("k", gate=gate("get"))
    with pytest.raises(KeyMissing):
        store.get("none", gate=gate("missing"))
    assert passed == ["put in", "put out", "get in", "get out"]


def test_a_wait_ends_when_the_object_comes_or_the_time_is_over_or_it_is_cancelled(store: Storage) -> None:
    cancel = threading.Event()
    began_s = time.monotonic()
    store.wait("none/yet", 0.02, cancel)
    assert time.monotonic() - began_s < 10
    timer = threading.Timer(0.05, lambda: store.put("run/a/b/soon", b"1"))
    timer.start()
    while store.watches:
        store.wait("run/a/b/soon", 20, cancel)
        try:
            assert store.get("run/a/b/soon") == b"1"
            break
        except KeyMissing:
            continue
    timer.join()
    cancel.set()
    store.wait("never", 20, cancel)
    assert time.monotonic() - began_s < 10


def in_threads(work: list[Callable[[], None]]) -> None:
    failures: list[BaseException] = []

    def run(item: Callable[[], None]) -> None:
        try:
            item()
        except BaseException as error:  # noqa: BLE001 - raised again below, in the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=run, args=(item,)) for item in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
