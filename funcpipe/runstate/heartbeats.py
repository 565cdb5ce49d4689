"""The heartbeats of workers: each attempt of a worker writes its own, and the newest attempt's counts.

Those of attempts that left no report stay: they are all that is known of the requests of one that died.
"""

import logging

from funcpipe.core import Heartbeat
from funcpipe.errors import CorruptMessage, KeyMissing
from funcpipe.platforms.base import Storage
from funcpipe.runstate.documents import READS, get_document
from funcpipe.runstate.keys import Keys

_log = logging.getLogger(__name__)


def newest_heartbeat(storage: Storage, keys: Keys, worker: str) -> Heartbeat | None:
    """The last heartbeat of the newest attempt of `worker` that has sent one; None if it is missing or damaged."""
    for _ in range(READS):
        found = storage.list(keys.heartbeats(worker))
        if not found:
            return None
        try:
            return get_document(storage, Heartbeat, found[-1])
        except KeyMissing:
            _log.debug("%s was deleted since it was listed; a later attempt has begun", found[-1])
        except CorruptMessage as error:
            _log.warning("does without a heartbeat: %s", error)
            return None
    return None


def attempt_of(keys: Keys, key: str) -> tuple[str, int]:
    """Return the worker, and its attempt, whose heartbeat has the key `key`."""
    worker, _, attempt = key.removeprefix(keys.all_heartbeats).partition("/")
    return worker, int(attempt)
