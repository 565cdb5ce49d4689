"""Deleting a run of many objects takes few requests."""

from funcpipe.platforms.local.throttle import Throttled
from funcpipe.platforms.wrappers import Counted, Retried
from funcpipe.runstate.generations import delete_generation, delete_objects
from funcpipe.runstate.keys import Keys
from tests.retries import Pauses
from tests.support.census import Census


def test_twenty_five_thousand_objects_are_deleted_in_seconds() -> None:
    census, pauses = Census(), Pauses()
    for number in range(25_000):
        census.put(Keys("run-1", number % 2).message("s0.r0", number, "put-split.s0.r0.k0"), b"")
    census.put(Keys("run-10").record, b"of another run")
    slow = Throttled(census, latency_s=0.04, clock=pauses.now_s, sleep=pauses.sleep)
    store = Counted(Retried(slow))
    delete_generation(store, Keys("run-1", 0))
    assert census.objects == 12_501
    delete_objects(store, "run-1")
    assert census.list("") == (Keys("run-10").record,)
    assert census.deletions <= 25_000 / 1000 + 4
    assert pauses.now_s() < 2.0  # and one more second for the pages of real listings
