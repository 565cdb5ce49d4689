"""The objects of a run that goes on are made young once a day, as storages may delete objects by their age.

    run-1/g0000-3fa9c2d1/renewals/00000003     says that this was done on the third day of the run

One function does it for all, or the client where there is no other. Its clock is the time that the run has taken, so
that no two clocks are compared. Objects that will not be read again are left to their age: all of dead attempts but
what the bill needs. Of a live one, the heartbeat is written anew all the time.
"""

import logging
import re
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from funcpipe.errors import KeyMissing, StorageError, Superseded
from funcpipe.platforms.base import Storage
from funcpipe.runstate.functions import marks_of
from funcpipe.runstate.generations import find_objects
from funcpipe.runstate.keys import Keys

_log = logging.getLogger(__name__)

DAY_S = 86_400.0
"""The interval of renewals: at least twice as often as the shortest age at which a deployment's objects expire."""

_AT_ONCE = 8
_OF_ATTEMPT = re.compile(r".+/(leases|heartbeats|hand-overs|traces|reports)/([^/]+)/(\d{8})", re.ASCII)


class Renewal:
    """Makes the objects of a run young, once in each day that it goes on, in a thread of its own within its context.

    Where several may do it, one after the other, a mark of the generation `keys` says which days are done.
    """

    def __init__(
        self,
        storage: Storage,
        run: str,
        *,
        keys: Keys | None = None,
        renewed: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Call `renewed` with the number of objects that were touched, whenever some were."""
        self._storage = storage
        self._run = run
        self._keys = keys
        self._renewed = renewed
        self._day = 0
        self._round: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="funcpipe-renewal")
        self._cancel = threading.Event()

    def __enter__(self) -> "Renewal":
        return self

    def __exit__(self, *_: object) -> None:
        """Leave what is not done to who comes next."""
        self._cancel.set()
        self._thread.shutdown(wait=True)

    def renew_due(self, run_s: float) -> None:
        """Begin to renew if that is due when the run has taken `run_s`."""
        day = int(run_s // DAY_S)
        if day > self._day and (self._round is None or self._round.done()):
            self._day = day
            self._round = self._thread.submit(self._try_to_renew, day)

    def _try_to_renew(self, day: int) -> None:
        try:
            self._renew(day)
        except Superseded as error:
            _log.info("leaves the objects of day %d to another: %s", day, error)
        except StorageError as error:
            _log.warning("could not renew all objects on day %d of the run, and tries again: %s", day, error)
            self._day = day - 1

    def _renew(self, day: int) -> None:
        done = [] if self._keys is None else list(self._storage.list(self._keys.renewals))
        if self._keys is not None and done and done[-1] >= self._keys.renewal(day):
            return
        needed = [
            *_needed(find_objects(self._storage, Keys(self._run).run_prefix).own),
            *marks_of(self._storage, self._run),
        ]
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="funcpipe-renewal") as pool:
            count = sum(pool.map(self._touch, needed))
        self._renewed(count)
        if self._cancel.is_set():
            return
        if self._keys is not None:
            self._storage.put(self._keys.renewal(day), b"")
            self._storage.delete_many(done)
        _log.info("renewed %d objects on day %d of the run", count, day)

    def _touch(self, key: str) -> bool:
        """Make an object young, if it is still there."""
        if self._cancel.is_set():
            return False
        try:
            self._storage.touch(key)
        except KeyMissing:
            return False
        return True


def _needed(objects: Iterable[str]) -> Iterable[str]:
    """Yield those of a run's objects that may still be read, but for the heartbeats that are written anew."""
    places = {key: match.groups() for key in objects if (match := _OF_ATTEMPT.fullmatch(key)) is not None}
    newest: dict[str, int] = {}
    for folder, worker, attempt in places.values():
        if folder == "leases":
            newest[worker] = max(newest.get(worker, 0), int(attempt))
    for key in objects:
        folder, worker, attempt = places.get(key, ("", "", "0"))
        is_old = int(attempt) < newest.get(worker, 0)
        if folder == "heartbeats":
            wanted = is_old and f"{key.partition('/heartbeats/')[0]}/reports/{worker}/{attempt}" not in places
        else:
            wanted = folder in ("", "reports") or int(attempt) >= newest.get(worker, 0) - 1
        if wanted:
            yield key
