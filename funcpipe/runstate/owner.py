"""The owner of a run: the one client that may start generations of it, restart its workers, collect and delete.

Clients of a run form a chain of leases: the client with the highest number owns the run, and what one before it still
writes or deletes is refused. An owner says who it is, and changes what it says every few seconds. Another client
watches for that change, so that no two clocks are compared: an owner that changes nothing for five heartbeats and five
seconds is dead.

    run-1/owner/leases/00000000.9b0c5d12
    run-1/owner/heartbeats/00000000.9b0c5d12

A run that is deleted takes its leases along, and the numbers begin anew. So each lease has a key of its own, which a
client that wakes late cannot take for another: it deletes its own lease, and what it found while it owned the run. Of
clients that put the same number at once, each lists all leases after its put: one of any two sees the other, and who
sees another withdraws and tries again.
"""

import contextlib
import getpass
import logging
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from types import TracebackType

from funcpipe.core import LeaseDocument, OwnerDocument
from funcpipe.core.settings import WHY_GONE
from funcpipe.errors import (
    CorruptMessage,
    KeyMissing,
    PlatformRefused,
    RunTaken,
    RunUnknown,
    StorageError,
    Superseded,
)
from funcpipe.platforms.base import Storage
from funcpipe.runstate.documents import exists, get_document, put_document
from funcpipe.runstate.generations import delete_objects, find_objects, list_generations
from funcpipe.runstate.keys import Keys, OwnerKeys
from funcpipe.runstate.lease import Fence, FencedStorage

_log = logging.getLogger(__name__)

BEAT_S = 2.0
"""The interval of an owner's heartbeats."""

_SILENT_BEATS, _SILENT_S = 5, 5.0
_POLL_S = 0.1
_WITHDRAWN_S = 0.5
"""At most how long a client waits that has withdrawn: some other time than others that have."""

_MOST_MISSING = 3
"""A lease that is missing just after it was put, so often, was not deleted by another client that leaves."""


class Ownership(Enum):
    """Another client's knowledge of a run's owner so far."""

    FREE = "there is none"
    HELD = "it is alive"
    UNCLEAR = "it may be dead"


class OwnerWatch:
    """Watches the owner of `run` for another client, poll by poll; `document` is the owner's last statement."""

    def __init__(self, storage: Storage, run: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._storage = storage
        self._keys = Keys(run).owner
        self._clock = clock
        self._seen: tuple[int | None, OwnerDocument | None] | None = None
        self._changed = False
        self._began_s = self._since_s = clock()
        self.document: OwnerDocument | None = None

    @property
    def attempt(self) -> int | None:
        """The number of the newest owner, as of the last poll."""
        return None if self._seen is None else self._seen[0]

    def poll(self) -> Ownership:
        """Return the knowledge after another poll."""
        leases = _list_leases(self._storage, self._keys)
        if not leases:
            self._seen = (None, None)
            return Ownership.FREE
        newest = max(leases.values())
        self.document = self._read(key for key, number in leases.items() if number == newest)
        if (newest, self.document) != self._seen:
            self._changed = self._seen is not None
            self._seen, self._since_s = (newest, self.document), self._clock()
        if self.document is not None and self.document.released:
            return Ownership.FREE
        every_s = BEAT_S if self.document is None else self.document.every_s
        if self._clock() - self._since_s > _SILENT_BEATS * every_s + _SILENT_S:
            _log.warning("run %s: its owner, %s, has gone silent", self._keys.run, _who(self.document))
            return Ownership.FREE
        return Ownership.HELD if self._changed and self.document is not None else Ownership.UNCLEAR

    def refuse(self) -> RunTaken:
        """Return the error that names the owner of the run, and the way out."""
        took_s = self._clock() - self._began_s
        _log.info("run %s: another client owns it, as was clear after %.2f s", self._keys.run, took_s)
        watches = self.document is not None and self.document.watches
        return RunTaken(self._keys.run, _who(self.document), watches=watches)

    def _read(self, leases: Iterable[str]) -> OwnerDocument | None:
        """Return the statement of the holder of one of `leases`; a client that has withdrawn has made none."""
        for lease in leases:
            heartbeat = self._keys.owner_heartbeats + lease.removeprefix(self._keys.owner_leases)
            with contextlib.suppress(KeyMissing, CorruptMessage):
                return get_document(self._storage, OwnerDocument, heartbeat)
        return None


def last_run(storage: Storage) -> str:
    """Return the name of the run that a client has started or resumed last. Raises RunUnknown if there is none."""
    since_s: dict[str, float] = {}
    for key in find_objects(storage, "").own:
        run = key.partition("/")[0]
        if key.startswith(Keys(run).owner.owner_heartbeats):
            with contextlib.suppress(KeyMissing, CorruptMessage):
                document = get_document(storage, OwnerDocument, key)
                since_s[run] = max(document.since_at_s, since_s.get(run, 0.0))
    if not since_s:
        raise RunUnknown("there is no run in this storage to resume; train without resume='last' (--resume last)")
    return max(since_s, key=lambda run: since_s[run])


class OwnerLease(Fence):
    """The right of one client to own a run as its owner `number`. It is not held until `take` returns."""

    def __init__(
        self,
        storage: Storage,
        keys: OwnerKeys,
        number: int,
        *,
        fresh_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`check` asks the storage only if it was not asked within the last `fresh_s` seconds."""
        super().__init__(fresh_s=fresh_s, clock=clock)
        self._storage = storage
        self._keys = keys
        self._number = number
        self.token = secrets.token_hex(4)
        self._lock = threading.Lock()

    @property
    def key(self) -> str:
        """The key of this lease, which no other client writes."""
        return self._keys.owner_lease(self._number, self.token)

    def take(self) -> None:
        """Become the owner. Raises Superseded if another client is, or if another wants to be at the same time."""
        put_document(self._storage, self.key, LeaseDocument(holder=self.token))
        try:
            self.check_now()
        except Superseded:
            self._storage.delete(self.key)
            raise
        self.taken = True
        _log.info("owns run %s as its owner %d", self._keys.run, self._number)

    def check_now(self) -> None:
        """Ask the storage, and raise Superseded if the lease is lost. Threads that ask at once share an answer."""
        called_s = self._clock()
        with self._lock:
            self._check_not_lost()
            if self._checked_s <= called_s:
                self._ask()

    def all_leases(self) -> tuple[str, ...]:
        """Ask the storage for the keys of all leases; raises Superseded if this one is lost. This one comes last."""
        with self._lock:
            self._check_not_lost()
            return self._ask()

    def _ask(self) -> tuple[str, ...]:
        asked_s = self._clock()
        leases = _list_leases(self._storage, self._keys)
        own = leases.pop(self.key, None)
        newest = max(leases.values(), default=-1)
        if newest > self._number or (newest == self._number and not self.taken):
            self._lose(f"another client is owner {newest} of run {self._keys.run}, or wants to be")
        if own is None and not (self.taken and exists(self._storage, self.key)):
            self._lose(f"the lease of owner {self._number} is missing: {WHY_GONE}", missing=True)
        self._checked_s = asked_s
        return (*leases, self.key)


def _list_leases(storage: Storage, keys: OwnerKeys) -> dict[str, int]:
    found = find_objects(storage, keys.owner_leases).own
    return {key: int(key.removeprefix(keys.owner_leases).partition(".")[0]) for key in found}


class _OwnersStorage(FencedStorage):
    """The storage of an owner. Each deletion asks: so what was found before it was there while this client owned it."""

    def delete(self, key: str) -> None:
        """Remove an object of this owner."""
        self._fence.check_now()
        super().delete(key)

    def delete_many(self, keys: Sequence[str]) -> None:
        """Remove objects of this owner."""
        self._fence.check_now()
        super().delete_many(keys)


class Owner:
    """This client as owner number `attempt` of `run`; it says so every `every_s` seconds within its context.

    `storage` writes and deletes only as long as no other client has taken over, and so does `parts`, for runs that are
    parts of this one, as trials are of a sweep: it asks for that as often only as heartbeats do.
    """

    def __init__(self, storage: Storage, run: str, attempt: int, *, every_s: float, watches: bool) -> None:
        self._raw = storage
        self._keys = Keys(run).owner
        self.attempt = attempt
        self._lease = OwnerLease(storage, self._keys, attempt, fresh_s=every_s)
        self._key = self._keys.owner_heartbeat(attempt, self._lease.token)
        self._document = OwnerDocument(who=_myself(), since_at_s=time.time(), every_s=every_s, watches=watches)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="funcpipe-owner", daemon=True)
        self._gone = False
        self.storage = _OwnersStorage(storage, self._lease)
        self.parts = FencedStorage(storage, self._lease)

    def take(self) -> None:
        """Become the owner; raises Superseded if another client is."""
        self._lease.take()
        self.beat()

    def __enter__(self) -> "Owner":
        self._thread.start()
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        """Leave the run to the next client that wants it; nothing stays if there is nothing else of the run."""
        self._end_thread()
        try:
            if not self._gone:
                self._leave()
        except StorageError as error:
            _log.warning("run %s: others will wait until this client counts as dead: %s", self._keys.run, error)

    def check(self) -> None:
        """Raise Superseded if another client is known to have taken over."""
        if self._lease.lost:
            self._lease.check_now()

    def check_now(self) -> None:
        """Ask the storage, and raise Superseded if another client has taken over."""
        self._lease.check_now()

    def beat(self) -> None:
        """Send a heartbeat."""
        self._document = replace(self._document, beat=self._document.beat + 1)
        put_document(self._raw, self._key, self._document)

    def delete_run(self, *, settle_s: float = 0.0) -> int:
        """Delete all objects of the run, and again after `settle_s`; returns how many there were.

        Objects that no run has written stay, and a warning says so.
        """
        self._lease.check_now()
        found = delete_objects(self.storage, self._keys.run)
        count = len(found.own)
        if settle_s:
            time.sleep(settle_s)
            found = delete_objects(self.storage, self._keys.run)
            count += len(found.own)
        if found.others:
            _log.warning("run %s: leaves %s, that no run has written", self._keys.run, found.others_text)
        self._end_thread()
        self._delete_own()
        return count

    def _leave(self) -> None:
        """Let others in. What was said of an owner that is none any more goes: it may have come after all else went."""
        try:
            self.check()
            if list_generations(self._raw, self._keys.run):
                put_document(self._raw, self._key, replace(self._document, released=True))
                self._lease.check_now()
            else:
                self._delete_own()
        except Superseded as error:
            _log.info("run %s: another client owns it: %s", self._keys.run, error)
            self._raw.delete(self._key)

    def _delete_own(self) -> None:
        """Delete what owners up to this one have said, then their leases, this client's own last."""
        heartbeats = find_objects(self._raw, self._keys.owner_heartbeats).own
        leases = self._lease.all_leases()
        self._gone = True
        for key in (*heartbeats, *leases):
            self._raw.delete(key)

    def _run(self) -> None:
        while not self._stop.wait(self._document.every_s):
            try:
                self._lease.check_now()
                self.beat()
            except Superseded:
                return
            except (StorageError, CorruptMessage) as error:
                _log.warning("run %s: cannot say that it is owned here: %s", self._keys.run, error)

    def _end_thread(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()


@contextlib.contextmanager
def owned(
    storage: Storage, run: str, *, every_s: float = BEAT_S, watches: bool = False, take_over: bool = False
) -> Iterator[Owner]:
    """Own `run` within this context. Raises RunTaken if another client that is alive does, unless with `take_over`, and
    PlatformRefused where the storage does not list what was written before.
    """
    missing = 0
    while True:
        watch = OwnerWatch(storage, run)
        while (known := watch.poll()) is Ownership.UNCLEAR and not take_over:
            time.sleep(_POLL_S)
        if known is Ownership.HELD and not take_over:
            raise watch.refuse()
        attempt = 0 if watch.attempt is None else watch.attempt + 1
        owner = Owner(storage, run, attempt, every_s=every_s, watches=watches)
        try:
            owner.take()
        except Superseded as error:
            missing += error.missing
            if missing == _MOST_MISSING:
                raise PlatformRefused(
                    f"listings of the storage lag behind writes, so two clients could own run {run}: what was just "
                    f"written was missing {missing} times; take a storage whose listings have what was written before"
                ) from error
            _log.info("run %s: another client was first: %s", run, error)
            time.sleep(random.SystemRandom().uniform(0.0, _WITHDRAWN_S))
            continue
        with owner:
            yield owner
        return


@contextlib.contextmanager
def raise_if_taken(run: str) -> Iterator[None]:
    """Raise RunTaken if, within this context, another client is found to have taken `run` over, RunUnknown if the lease
    of this one is gone.
    """
    try:
        yield
    except Superseded as error:
        if error.missing:
            raise RunUnknown(f"run {run}: {error}; give the command again") from error
        raise RunTaken(run, f"another client, which has taken it over ({error})") from error


def refuse_if_owned(storage: Storage, run: str, *, clock: Callable[[], float] = time.monotonic) -> None:
    """Raise RunTaken if a client that is alive owns `run` and does not only watch it.

    This only spares a second client needless work: in case of doubt, `owned` decides.
    """
    watch, until_s = OwnerWatch(storage, run, clock=clock), clock() + 2 * BEAT_S
    while (known := watch.poll()) is Ownership.UNCLEAR and clock() < until_s:
        time.sleep(_POLL_S)
    if known is Ownership.HELD and not (watch.document is not None and watch.document.watches):
        raise watch.refuse()


def _myself() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in containers
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}, process {os.getpid()}"


def _who(document: OwnerDocument | None) -> str:
    if document is None:
        return "a client that has not said who it is"
    return f"{document.who}, since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(document.since_at_s))}"
