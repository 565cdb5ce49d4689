"""The order to end a run early, which any worker or client may give and every worker obeys."""

import logging

from funcpipe.core import Halt
from funcpipe.errors import KeyExists, KeyMissing
from funcpipe.platforms.base import Storage
from funcpipe.runstate.documents import get_document, put_document
from funcpipe.runstate.keys import Keys

_log = logging.getLogger(__name__)


def read_halt(storage: Storage, keys: Keys) -> Halt | None:
    """The order to end the run, if there is one."""
    try:
        return get_document(storage, Halt, keys.halt)
    except KeyMissing:
        return None


def halt_run(storage: Storage, keys: Keys, halt: Halt) -> Halt:
    """Order the run to end; the order that counts, which is the first that anybody gave."""
    try:
        put_document(storage, keys.halt, halt, if_absent=True)
    except KeyExists:
        return get_document(storage, Halt, keys.halt)
    when = "at once" if halt.step is None else f"after step {halt.step}"
    _log.warning("ordered the run to end %s: %s", when, halt.reason)
    return halt
