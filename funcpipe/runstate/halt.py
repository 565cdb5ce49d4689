"""Orders to end a run early, which any worker or client may give and every worker obeys.

Orders have numbers, and every worker obeys the same ones. A worker may be asleep between its decision and the order,
and order what was right long ago. Therefore an order of a worker holds only if that worker, when the first who has to
obey asks, was not superseded but by a successor that it has handed over to; and no order holds if a worker has passed
its step before it read it. The first to find out puts the verdict, and all others read it. An order that does not
hold may be followed by another; and one to end at once may follow any order to end after a step.
"""

import itertools
import logging
from collections.abc import Iterator

from funcpipe.core import Halt, HaltVerdict, RequestCounts
from funcpipe.errors import CorruptMessage, KeyExists
from funcpipe.platforms.base import Storage
from funcpipe.runstate.documents import exists, find_document, find_readable_document, get_document, put_document
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.lease import is_superseded

_log = logging.getLogger(__name__)


ORDERING = RequestCounts(puts=1)
"""The storage requests of `halt_run`, where no order has been given before."""


def read_halt(storage: Storage, keys: Keys) -> Halt | None:
    """Return the order to end the run that counts, if there is one."""
    newest = None
    for number, halt in _orders(storage, keys):
        if read_verdict(storage, keys, number) is not False:
            newest = halt
    return newest


def read_halt_reason(storage: Storage, keys: Keys) -> str:
    """Return why the run was ended: by the order that counts, or by the newest, if it was found not to hold."""
    halt = read_halt(storage, keys)
    for _, newest in () if halt is not None else _orders(storage, keys):
        halt = newest
    return "its functions have ended, and no order says why; its logs do" if halt is None else halt.reason


def read_certain_halt(storage: Storage, keys: Keys) -> Halt | None:
    """Return the newest order to end the run that a client gave, or that a worker has found to hold."""
    certain = None
    for number, halt in _orders(storage, keys):
        if halt.worker is None or read_verdict(storage, keys, number):
            certain = halt
    return certain


def read_order(storage: Storage, keys: Keys, number: int) -> Halt | None:
    """Return the order of that number, if it was given."""
    return find_document(storage, Halt, keys.order(number))


def read_verdict(storage: Storage, keys: Keys, number: int) -> bool | None:
    """Return True if the order of that number holds; None if that is not decided yet, or the verdict cannot be read."""
    verdict = find_readable_document(storage, HaltVerdict, keys.verdict(number))
    return None if verdict is None else verdict.holds


def halt_run(storage: Storage, keys: Keys, halt: Halt) -> Halt:
    """Order the run to end; the order that counts, which is the first of those that hold."""
    for number in itertools.count():
        try:
            put_document(storage, keys.order(number), halt, if_absent=True)
        except KeyExists:
            other = find_readable_document(storage, Halt, keys.order(number))
            if other is None:  # it cannot be read, so no worker obeys it
                continue
            overruled = halt.step is None and other.step is not None
            if overruled or read_verdict(storage, keys, number) is False:
                continue
            return other
        when = "at once" if halt.step is None else f"after step {halt.step}"
        _log.warning("ordered the run to end %s: %s", when, halt.reason)
        return halt
    raise AssertionError("there is always another number")


def decide(storage: Storage, keys: Keys, number: int, halt: Halt, *, late: bool = False) -> bool:
    """Return True if the order `halt` of that number holds, as the first worker that asked has found.

    The caller must obey it now, or is `late`: it has passed the order's step already.
    """
    given_by_client = halt.worker is None or halt.attempt is None
    if given_by_client and halt.step is None:
        return True
    holds = not late and (given_by_client or _may_order(storage, keys, str(halt.worker), halt.attempt or 0))
    try:
        put_document(storage, keys.verdict(number), HaltVerdict(holds=holds), if_absent=True)
    except KeyExists:
        return get_document(storage, HaltVerdict, keys.verdict(number)).holds
    if not holds:
        why = "came too late" if late else f"was given by attempt {halt.attempt} of {halt.worker}, which was superseded"
        _log.warning("the order to end the run (%s) does not hold: it %s", halt.reason, why)
    return holds


def _may_order(storage: Storage, keys: Keys, worker: str, attempt: int) -> bool:
    """Return True if an attempt's orders hold: it still is the worker, or has handed over, which it does last."""
    return not is_superseded(storage, keys, worker, attempt) or exists(storage, keys.hand_over(worker, attempt))


def _orders(storage: Storage, keys: Keys) -> Iterator[tuple[int, Halt]]:
    for number in itertools.count():
        try:
            halt = read_order(storage, keys, number)
        except CorruptMessage as error:
            _log.warning("does without an object that cannot be read: %s", error)
            continue
        if halt is None:
            return
        yield number, halt
