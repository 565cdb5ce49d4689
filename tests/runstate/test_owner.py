"""Clients that want to own the same run: who is refused, who counts as dead, what the one that lost may still do."""

import itertools
import threading

import pytest

from funcpipe.core import LeaseDocument, OwnerDocument
from funcpipe.errors import KeyMissing, PlatformRefused, RunTaken, StorageError, Superseded
from funcpipe.platforms.base import OPEN, Gate
from funcpipe.runstate import owner
from funcpipe.runstate.documents import put_document
from funcpipe.runstate.generations import list_generations, reserve_generation
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.owner import Owner, OwnerLease, Ownership, OwnerWatch, last_run, owned, refuse_if_owned
from funcpipe.testing.memory_storage import MemoryStorage
from tests.support.hostile_storage import HostileStorage, Hostility
from tests.support.waiting import LONG_S

RUN = "run-1"
QUICK_S = 0.02


class Clock:
    """A clock that a test moves."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def storage() -> MemoryStorage:
    return MemoryStorage()


@pytest.fixture
def first(storage: MemoryStorage) -> Owner:
    """An owner that says something only when a test has it say so."""
    made = Owner(storage, RUN, 0, every_s=2.0, watches=False)
    made.take()
    return made


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Owners that say nothing for half a second count as dead."""
    monkeypatch.setattr(owner, "_SILENT_S", 0.4)


def test_an_owner_counts_as_alive_once_it_changes_what_it_says(storage: MemoryStorage, first: Owner) -> None:
    clock = Clock()
    watch = OwnerWatch(storage, RUN, clock=clock)
    assert watch.poll() is Ownership.UNCLEAR
    clock.now_s = 14.0
    assert watch.poll() is Ownership.UNCLEAR
    first.beat()
    assert watch.poll() is Ownership.HELD
    assert watch.document is not None
    assert "@" in watch.document.who
    clock.now_s = 28.9  # five heartbeats and five seconds after it was heard of
    assert watch.poll() is Ownership.HELD
    clock.now_s = 29.1
    assert watch.poll() is Ownership.FREE


def test_an_owner_that_was_never_heard_of_counts_as_dead_after_a_while(storage: MemoryStorage) -> None:
    put_document(storage, Keys(RUN).owner.owner_lease(0, "ab"), LeaseDocument(holder="a client that has died at once"))
    clock = Clock()
    watch = OwnerWatch(storage, RUN, clock=clock)
    assert watch.poll() is Ownership.UNCLEAR
    clock.now_s = 15.1
    assert watch.poll() is Ownership.FREE


def test_a_damaged_heartbeat_of_an_owner_is_none(storage: MemoryStorage, first: Owner) -> None:
    (key,) = storage.list(Keys(RUN).owner.owner_heartbeats)
    storage.put(key, b"no document")
    clock = Clock()
    watch = OwnerWatch(storage, RUN, clock=clock)
    assert watch.poll() is Ownership.UNCLEAR
    assert "has not said who it is" in str(watch.refuse())


def test_a_second_client_is_refused_and_told_by_whom_since_when_and_what_to_do(storage: MemoryStorage) -> None:
    with (
        owned(storage, RUN, every_s=QUICK_S),
        pytest.raises(
            RunTaken,
            match=r"@.*, process \d+, since 2.*: choose another name, .*funcpipe run status run-1.*--take-over",
        ),
        owned(storage, RUN),
    ):
        pass
    assert storage.list("") == ()  # nothing else was there


def test_of_clients_that_come_at_once_one_owns_the_run(storage: MemoryStorage) -> None:
    together, end = threading.Barrier(4), threading.Event()
    won, refused = [], []

    def client(number: int) -> None:
        together.wait()
        try:
            with owned(storage, RUN, every_s=QUICK_S):
                won.append(number)
                end.wait(LONG_S)
        except RunTaken:
            refused.append(number)
            if len(refused) == 3:
                end.set()

    clients = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join(30)
    assert (len(won), len(refused)) == (1, 3)
    assert storage.list("") == ()


def test_a_client_withdraws_that_sees_another_which_wants_the_same_number(storage: MemoryStorage) -> None:
    keys = Keys(RUN).owner
    rival = keys.owner_lease(0, "ab")
    put_document(storage, rival, LeaseDocument(holder="ab"))
    lease = OwnerLease(storage, keys, 0, fresh_s=1.0)
    with pytest.raises(Superseded, match="wants to be"):
        lease.take()
    assert storage.list("") == (rival,)


def test_what_a_dead_owner_says_late_is_not_taken_for_the_word_of_the_next_of_its_number(
    storage: MemoryStorage, first: Owner
) -> None:
    with owned(storage, RUN, take_over=True) as second:
        second.delete_run()
    third = Owner(storage, RUN, 0, every_s=2.0, watches=True)
    third.take()
    for late in (first, third, first):
        late.beat()
        watch = OwnerWatch(storage, RUN)
        watch.poll()
        assert watch.document is not None
        assert watch.document.watches


def test_an_owner_that_leaves_a_run_lets_the_next_one_in_at_once(storage: MemoryStorage) -> None:
    with owned(storage, RUN) as before:
        reserve_generation(before.storage, RUN)
    assert OwnerWatch(storage, RUN).poll() is Ownership.FREE
    with owned(storage, RUN) as after:
        assert after.delete_run() == 1
    assert storage.list("") == ()


def test_a_dead_owner_is_succeeded(storage: MemoryStorage, impatient: None) -> None:
    Owner(storage, RUN, 0, every_s=QUICK_S, watches=False).take()
    refuse_if_owned(storage, RUN, clock=iter_clock())  # in case of doubt it does not refuse
    with owned(storage, RUN, every_s=QUICK_S) as after:
        after.check_now()


def iter_clock() -> Clock:
    """A clock that moves by a second with every look."""

    class Running(Clock):
        def __call__(self) -> float:
            self.now_s += 1.0
            return self.now_s

    return Running()


def test_who_was_taken_over_from_writes_and_deletes_nothing_more(storage: MemoryStorage) -> None:
    with owned(storage, RUN, every_s=QUICK_S) as before:
        keys = reserve_generation(before.storage, RUN)
        with owned(storage, RUN, take_over=True) as after:
            after.storage.put(keys.record, b"of the second")
            for act in (before.check_now, before.check, before.delete_run):
                with pytest.raises(Superseded):
                    act()
            with pytest.raises(Superseded):
                before.storage.put(keys.record, b"of the first")
            assert storage.get(keys.record) == b"of the second"
    assert list_generations(storage, RUN) == (keys,)
    assert OwnerWatch(storage, RUN).poll() is Ownership.FREE


def test_a_client_that_sleeps_while_its_run_is_deleted_does_not_own_the_next_one_of_that_name(
    storage: MemoryStorage, first: Owner
) -> None:
    with owned(storage, RUN, take_over=True) as second:
        second.delete_run()
    with owned(storage, RUN, every_s=QUICK_S) as third:
        keys = reserve_generation(third.storage, RUN)
        with pytest.raises(Superseded):
            first.check_now()
        with pytest.raises(Superseded):
            first.delete_run()
        third.check_now()
        assert list_generations(storage, RUN) == (keys,)


def test_a_watcher_refuses_nobody_who_only_looks_on(storage: MemoryStorage) -> None:
    with owned(storage, RUN, every_s=QUICK_S, watches=True):
        refuse_if_owned(storage, RUN)
        with pytest.raises(RunTaken, match="is watching run run-1") as caught, owned(storage, RUN):
            pass
    assert caught.value.watches
    with owned(storage, RUN, every_s=QUICK_S), pytest.raises(RunTaken, match="is training run run-1"):
        refuse_if_owned(storage, RUN)


class Broken(MemoryStorage):
    """A storage that refuses writes while it is told to."""

    refuses = False

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        if self.refuses:
            raise StorageError("out of order")
        super().put(key, data, if_absent=if_absent, gate=gate)


def test_an_owner_that_cannot_say_that_it_leaves_says_so_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    storage = Broken()
    with owned(storage, RUN) as held:
        reserve_generation(held.storage, RUN)
        storage.refuses = True
    assert "others will wait until this client counts as dead: out of order" in caplog.text


def test_objects_of_a_half_deleted_run_do_not_count_as_a_run(storage: MemoryStorage) -> None:
    class Dies(MemoryStorage):
        left = 2

        def delete(self, key: str) -> None:
            if not self.left:
                raise StorageError("the client has died")
            self.left -= 1
            super().delete(key)

    dying = Dies()
    with owned(dying, RUN) as held:
        keys = reserve_generation(dying, RUN)
        for key in (keys.record, keys.record_copy, keys.bundle(0), keys.checkpoint(0, "x")):
            dying.put(key, b"x")
        with pytest.raises(StorageError):
            held.delete_run()
    with pytest.raises(KeyMissing):
        dying.get(keys.record)
    with pytest.raises(KeyMissing):
        dying.get(keys.record_copy)
    assert dying.get(keys.bundle(0)) == b"x"


def test_a_storage_that_lists_late_is_refused(storage: MemoryStorage) -> None:
    """Before, a client tried to become the owner for ever, and said nothing."""
    late = HostileStorage(storage, Hostility(late_s=LONG_S, lists_late=True))
    with pytest.raises(PlatformRefused, match="listings of the storage lag behind writes"), owned(late, RUN):
        pytest.fail("owns what it cannot see")
    assert storage.list("") == ()


def test_a_lease_that_is_there_and_not_listed_is_held() -> None:
    class Forgetful(MemoryStorage):
        lists = True

        def list(self, prefix: str) -> tuple[str, ...]:
            return super().list(prefix) if self.lists else ()

    storage = Forgetful()
    lease = OwnerLease(storage, Keys(RUN).owner, 0, fresh_s=0.0)
    lease.take()
    storage.lists = False
    lease.check_now()
    storage.delete(lease.key)
    with pytest.raises(Superseded, match="the lease of owner 0 is missing"):
        lease.check_now()


class SlowLists(MemoryStorage):
    """The first list stands still until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.lists, self.is_asked, self.goes_on = 0, threading.Event(), threading.Event()

    def list(self, prefix: str) -> tuple[str, ...]:
        """Return the keys, maybe later."""
        found = super().list(prefix)
        self.lists += 1
        if self.lists == 1:
            self.is_asked.set()
            assert self.goes_on.wait(LONG_S)
        return found


def test_threads_that_ask_at_once_share_an_answer_but_none_that_is_older_than_their_question() -> None:
    storage, now, called = SlowLists(), itertools.count(), threading.Semaphore(0)

    def clock() -> float:
        called.release()
        return float(next(now))

    storage.goes_on.set()
    lease = OwnerLease(storage, Keys(RUN).owner, 0, fresh_s=2.0, clock=clock)
    lease.take()
    storage.goes_on.clear()
    storage.lists = 0
    while called.acquire(blocking=False):
        pass
    threads = [threading.Thread(target=lease.check_now) for _ in range(8)]
    threads[0].start()
    assert storage.is_asked.wait(LONG_S)
    for thread in threads[1:]:
        thread.start()
    for _ in range(2 + 7):  # two of the first, which asks, and one of each that waits for it
        assert called.acquire(timeout=LONG_S)
    storage.goes_on.set()
    for thread in threads:
        thread.join(LONG_S)
    assert storage.lists == 2  # the first one's, and one for all that came while it was under way


def test_a_damaged_owner_does_not_hide_the_run_that_was_begun_last(storage: MemoryStorage) -> None:
    for since_s, run in enumerate(("late", "early", "damaged")[::-1]):
        keys = Keys(run).owner
        document = OwnerDocument(who="a client", since_at_s=float(since_s), every_s=1.0)
        put_document(storage, keys.owner_heartbeat(0, "0000"), document)
    storage.put(Keys("damaged").owner.owner_heartbeat(1, "0000"), b"\0")
    assert last_run(storage) == "late"
