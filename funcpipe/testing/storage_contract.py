"""What every storage back-end must do, as a suite for pytest.

A test module of a back-end gives the fixture `store`, an empty storage for each test, and inherits the suite::

    class TestMyStorage(StorageContract):
        @pytest.fixture
        def store(self) -> Storage:
            return MyStorage(...)
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from funcpipe.errors import KeyExists, KeyMissing
from funcpipe.platforms.base import DELETE_BATCH, Storage

_BODY = bytes(range(256)) + b"funcpipe"


class StorageContract:
    """Inherit this; every method takes the fixture `store`."""

    def test_what_was_put_is_got_whole_and_in_ranges(self, store: Storage) -> None:
        """Ranges end where the object does."""
        for key, data in (("k", _BODY), ("a/b-1/c_2.d", b"1"), ("empty", b"")):
            store.put(key, data)
            assert store.get(key) == data
            for last in (1, 5, 263, 264, 400):
                assert store.get(key, start=-last) == data[-last:]
            for start in (0, 1, 255, 263, 264, 300):
                assert store.get(key, start=start) == data[start:]
                for stop in (start, start + 1, start + 5, 400):
                    assert store.get(key, start=start, stop=stop) == data[start:stop]

    def test_a_missing_object_is_an_error_that_names_it(self, store: Storage) -> None:
        """Also where other keys begin with the same words."""
        assert "'run/nothing'" in str(_raised(KeyMissing, lambda: store.get("run/nothing")))
        store.put("run/a/b", b"1")
        assert "'run/a'" in str(_raised(KeyMissing, lambda: store.get("run/a")))

    def test_a_memoryview_is_written_as_its_bytes(self, store: Storage) -> None:
        """Of whatever it shows a part."""
        store.put("k", memoryview(bytearray(b"abcd"))[1:3])
        assert store.get("k") == b"bc"

    def test_put_replaces_unless_told_not_to(self, store: Storage) -> None:
        """A put that is refused leaves the object as it was."""
        store.put("k", b"1")
        store.put("k", b"22")
        assert store.get("k") == b"22"
        assert "'k'" in str(_raised(KeyExists, lambda: store.put("k", b"333", if_absent=True)))
        assert store.get("k") == b"22"
        store.put("new", b"1", if_absent=True)
        assert store.get("new") == b"1"

    def test_of_many_conditional_puts_one_succeeds(self, store: Storage) -> None:
        """Leases depend on this."""
        won: list[int] = []

        def put(number: int) -> None:
            try:
                store.put("lease", str(number).encode(), if_absent=True)
            except KeyExists:
                return
            won.append(number)

        _in_threads([lambda n=n: put(n) for n in range(16)])  # type: ignore[misc]
        assert len(won) == 1
        assert store.get("lease") == str(won[0]).encode()

    def test_delete_is_repeatable_and_list_is_by_prefix(self, store: Storage) -> None:
        """A prefix need not end where a folder would."""
        for key in ("run-1/b", "run-1/a/x", "run-10/a", "other"):
            store.put(key, b"")
        assert store.list("run-1/") == ("run-1/a/x", "run-1/b")
        assert store.list("run-1") == ("run-1/a/x", "run-1/b", "run-10/a")
        assert store.list("") == ("other", "run-1/a/x", "run-1/b", "run-10/a")
        for _ in range(2):
            store.delete("run-1/a/x")
        assert store.list("run-1/") == ("run-1/b",)
        assert store.list("nowhere/") == ()

    def test_an_etag_changes_when_other_bytes_are_put(self, store: Storage) -> None:
        """That of any other object stays."""
        store.put("run/a", b"1")
        store.put("run/b", b"1")
        store.put("else", b"1")
        before = store.etags("run/")
        store.put("run/a", b"2")
        after = store.etags("run/")
        assert sorted(before) == sorted(after) == ["run/a", "run/b"]
        assert before["run/a"] != after["run/a"]
        assert before["run/b"] == after["run/b"]
        assert sorted(store.etags("")) == ["else", "run/a", "run/b"]
        assert dict(store.etags("nowhere/")) == {}

    def test_many_objects_are_deleted_at_once(self, store: Storage) -> None:
        """Also none, and such as are missing."""
        for key in ("run-1/a", "run-1/b-1/c_2.d", "run-1/e", "run-2/a"):
            store.put(key, b"1")
        store.delete_many(("run-1/a", "run-1/nothing", "run-1/b-1/c_2.d", "run-1/a/none"))
        assert store.list("") == ("run-1/e", "run-2/a")
        store.delete_many(())
        store.delete_many(("run-1/a",))
        store.delete_many([f"run-1/many-{number}" for number in range(DELETE_BATCH + 1)] + ["run-1/e"])
        assert store.list("") == ("run-2/a",)

    def test_a_touched_object_stays_as_it_is(self, store: Storage) -> None:
        """An empty one, too; a missing one is an error that names it."""
        for key, data in (("run/a/b-1", _BODY), ("run/empty", b"")):
            store.put(key, data)
            for _ in range(2):
                store.touch(key)
            assert store.get(key) == data
        assert "'run/a'" in str(_raised(KeyMissing, lambda: store.touch("run/a")))
        store.delete("run/empty")
        assert "'run/empty'" in str(_raised(KeyMissing, lambda: store.touch("run/empty")))
        assert store.list("") == ("run/a/b-1",)

    def test_readers_see_all_of_an_object_or_none_of_it(self, store: Storage) -> None:
        """While another thread replaces it."""
        bodies = [bytes([value]) * 200_000 for value in range(4)]
        store.put("k", bodies[0])
        stop = threading.Event()
        seen: set[bytes] = set()

        def read() -> None:
            while not stop.is_set():
                seen.add(store.get("k"))

        def write() -> None:
            try:
                for body in bodies * 10:
                    store.put("k", body)
            finally:
                stop.set()

        _in_threads([read, read, write])
        assert seen <= set(bodies)

    def test_the_gate_is_held_while_the_body_moves(self, store: Storage) -> None:
        """Where there is no body, it is not entered."""
        passed: list[str] = []

        @contextmanager
        def gate(name: str) -> Iterator[None]:
            passed.append(f"{name} in")
            yield
            passed.append(f"{name} out")

        store.put("k", b"1", gate=gate("put"))
        store.get("k", gate=gate("get"))
        _raised(KeyMissing, lambda: store.get("none", gate=gate("missing")))
        assert passed == ["put in", "put out", "get in", "get out"]

    def test_a_wait_ends_when_the_object_comes_or_the_time_is_over_or_it_is_cancelled(self, store: Storage) -> None:
        """It may end before, and where the storage does not watch, when the time is over only."""
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


def _raised(kind: type[Exception], act: Callable[[], object]) -> Exception:
    """The error of that kind that `act` raises; it is wrong if it raises none."""
    try:
        act()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def _in_threads(work: list[Callable[[], None]]) -> None:
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
