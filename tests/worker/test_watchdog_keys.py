"""Which runs a watchdog restarts workers of: those whose keys it is told, or can unwrap."""

import dataclasses
from collections.abc import Iterator

import pytest

from funcpipe.core import WatchSpec
from funcpipe.platforms.shared.cloud import KeyWrap
from funcpipe.runstate.functions import list_detached, mark_detached
from funcpipe.runstate.signing import KeyFolder, key_of
from tests.worker.test_watchdog import RUN, Place, Threads, assert_collected, job, keys_in


@pytest.fixture(scope="module", autouse=True)
def traced() -> None:
    """A model cannot be traced while threads draw random numbers in the same process."""
    job(1)


@pytest.fixture
def place() -> Iterator[Place]:
    """A detached run whose only worker has died, and nobody knows."""
    made = Place(1)
    made.start(fatal="checkpoints/s0/00000004", victims=(0,))
    yield made
    made.platform.stop_all()


def key_of_run(place: Place) -> str:
    return key_of(KeyFolder(), keys_in(place.storage)).text


def test_a_watchdog_of_another_deployment_restarts_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Threads, "secret", "of another deployment")
        place.watch()
    assert "could not be watched: the key of run run-1 is not on this machine" in caplog.text
    assert place.attempts() == {"s0.r0": 1}
    assert list_detached(place.storage) == (keys_in(place.storage).prefix,)
    place.watch()
    assert place.attempts() == {"s0.r0": 2}
    assert_collected(place)


def test_a_mark_that_anybody_else_has_written_restarts_nothing(place: Place) -> None:
    keys, planted = keys_in(place.storage), "ab" * 32
    for wrapped in ("", "no key", planted, KeyWrap("a guess").wrap(planted), place.platform.wrap_key(planted)):
        mark_detached(place.storage, keys, wrapped)
        place.watch()
        assert place.attempts() == {"s0.r0": 1}, wrapped
    mark_detached(place.storage, keys, place.platform.wrap_key(key_of_run(place)))
    place.watch()
    assert place.attempts() == {"s0.r0": 2}
    assert_collected(place)


def test_a_watchdog_that_is_told_the_run_s_key_needs_no_secret(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Threads, "secret", "unknown")
    told = WatchSpec(storage="memory://", run=RUN, run_key="ab" * 32)
    place.watch(told)
    assert place.attempts() == {"s0.r0": 1}
    place.watch(dataclasses.replace(told, run_key=key_of_run(place)))
    assert place.attempts() == {"s0.r0": 2}
    assert_collected(place)
