"""A restart by a peer is logged with its cause, and so is one that fails or is given up."""

import logging

import pytest

from funcpipe.core import RunAccount
from funcpipe.platforms.function_group import MAX_RESTARTS
from funcpipe.runstate.generations import write_payload
from tests.worker.test_peer_recovery import KEYS, SILENT_S, STARTING_S, Place


@pytest.fixture
def place() -> Place:
    made = Place()
    write_payload(made.storage, KEYS, made.spec(0))
    made.lease(0)
    made.beat(0, 1)
    return made


def test_a_restart_is_logged_with_the_time_of_silence_by_the_one_peer_that_makes_it(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="funcpipe")
    both = place.peers(0), place.peers(1)
    for peers in both:
        place.look(peers)
    place.now_s = SILENT_S + 1
    for peers in both[::-1]:
        peers._restart("s0.r0", 3, RunAccount())
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        f"restarts worker s0.r0 as attempt 1, try 1: silent for {SILENT_S + 1:.1f} s",
        "started function function 1 as attempt 1 of worker s0.r0",
        "another peer restarts worker s0.r0",
    ]


def test_a_restart_that_the_platform_refuses_and_giving_up_are_logged(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="funcpipe")
    place.platform.fails = True
    peers = place.peers()
    for _ in range(2 * MAX_RESTARTS + 3):
        place.look(peers)
        place.now_s += STARTING_S + 1
    assert "worker s0.r0 could not be restarted: no room" in caplog.text
    reason = f"worker s0.r0 was started again {MAX_RESTARTS} times without a step in between"
    assert f"ordered the run to end at once: {reason}" in caplog.text
