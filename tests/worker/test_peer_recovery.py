"""A worker that nobody hears of any more is started again by one of those that wait for it."""

from dataclasses import dataclass, field, replace

import pytest

from funcpipe.core import FaultTolerance, HandOver, LeaseDocument, Outcome, Restart, RunAccount, RunLimits, WorkerSpec
from funcpipe.platforms.base import Storage
from funcpipe.platforms.function_group import MAX_RESTARTS
from funcpipe.runstate.documents import get_document, put_document
from funcpipe.runstate.functions import list_functions
from funcpipe.runstate.generations import write_payload
from funcpipe.runstate.halt import read_halt
from funcpipe.runstate.keys import Keys
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.worker.peer_recovery import PeerRecovery
from tests.e2e import small
from tests.recording import Recording
from tests.run_documents import BEAT
from tests.support.run_keys import NONCE, RUN_KEY, signed_for_tests

KEYS = Keys("run-1", 0, NONCE)
FAULTS = FaultTolerance(heartbeat_s=1.0, lease_s=2.0, start_s=10.0, cold_start_s=0.5)
SILENT_S = 2.0 + 3 * 1.0 + 2 * 0.5
STARTING_S = 10.0 + 2 * 0.5


SO_FAR = RunAccount(spent_usd=1.5, elapsed_s=30.0, requests_usd=0.25, step_s=2.5)


@dataclass
class Place:
    """A storage, a platform and a clock; `s0.r0` is waited for by `s1.r0` and by `s1.r1`."""

    storage: Storage = field(default_factory=lambda: signed_for_tests(MemoryStorage()))
    platform: Recording = field(default_factory=Recording)
    now_s: float = 0.0

    def spec(self, stage: int, replica: int = 0) -> WorkerSpec:
        return WorkerSpec(
            run=KEYS.run,
            attempt=0,
            stage=stage,
            replica=replica,
            plan=small.plan(),
            storage="memory://",
            platform=self.platform.url,
            bundle="b",
            bundle_sha256="0",
            parameters="p",
            epochs=1,
            seed=0,
            message_deadline_s=60.0,
            nonce=NONCE,
            run_key=RUN_KEY.text,
            faults=FAULTS,
            limits=RunLimits(max_usd=5.0),
        )

    def peers(self, replica: int = 0) -> PeerRecovery:
        return PeerRecovery(self.spec(1, replica), self.storage, KEYS, self.platform.open, clock=lambda: self.now_s)

    def look(self, peers: PeerRecovery, *, step: int = 3) -> None:
        peers.check({"s0.r0"}, step=step, account=SO_FAR)

    def beat(self, attempt: int, beat: int) -> None:
        put_document(self.storage, KEYS.heartbeat("s0.r0", attempt), replace(BEAT, attempt=attempt, beat=beat))

    def lease(self, attempt: int) -> None:
        put_document(self.storage, KEYS.lease("s0.r0", attempt), LeaseDocument(holder="somebody"))


@pytest.fixture
def place() -> Place:
    made = Place()
    write_payload(made.storage, KEYS, made.spec(0))
    return made


def test_a_silent_worker_is_started_again_as_the_next_attempt_by_one_of_those_that_wait(place: Place) -> None:
    place.lease(0)
    place.beat(0, 7)
    both = place.peers(0), place.peers(1)
    for now_s in (0.0, SILENT_S, SILENT_S + 0.1, SILENT_S + 0.2):
        place.now_s = now_s
        for peers in both:
            place.look(peers)
    (again,) = place.platform.invoked
    assert again == replace(place.spec(0), attempt=1, account=SO_FAR)
    assert [(found.worker, found.attempt) for found in list_functions(place.storage, KEYS)] == [("s0.r0", 1)]


def test_a_worker_that_is_heard_of_or_not_waited_for_any_more_is_left_alone(place: Place) -> None:
    place.lease(0)
    peers = place.peers()
    for beat in range(20):
        place.now_s = beat * SILENT_S
        place.beat(0, beat)
        place.look(peers)
    peers.check(set(), step=3, account=RunAccount())
    place.now_s += SILENT_S + 1
    place.look(peers)
    assert place.platform.invoked == []


def test_a_worker_that_was_never_heard_of_has_time_to_start(place: Place) -> None:
    peers = place.peers()
    place.look(peers)
    place.now_s = STARTING_S
    place.look(peers)
    assert place.platform.invoked == []
    place.now_s = STARTING_S + 0.1
    place.look(peers)
    (first,) = place.platform.invoked
    assert isinstance(first, WorkerSpec)
    assert first.attempt == 0


def test_silence_does_not_count_while_storage_is_out_of_reach(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.lease(0)
    place.beat(0, 1)
    peers = place.peers()
    place.look(peers)

    def answers_late(*_: object) -> None:
        place.now_s += SILENT_S + 0.1

    monkeypatch.setattr("funcpipe.worker.peer_recovery.newest_heartbeat", answers_late)
    place.look(peers)
    monkeypatch.undo()
    place.now_s += SILENT_S
    place.look(peers)
    assert place.platform.invoked == []
    place.now_s += 0.1
    place.look(peers)
    assert len(place.platform.invoked) == 1


def test_a_worker_that_has_failed_ends_the_run(place: Place) -> None:
    place.lease(0)
    place.beat(0, 1)
    put_document(place.storage, KEYS.lease("s0.r0", 1), LeaseDocument(holder="somebody", ended=Outcome.FAILED))
    peers = place.peers()
    place.look(peers)
    place.now_s = SILENT_S + 0.1
    place.look(peers)
    order = read_halt(place.storage, KEYS)
    assert order is not None
    assert order.reason == "worker s0.r0 failed"
    assert place.platform.invoked == []


def test_a_restart_that_comes_to_nothing_is_made_again_until_the_run_is_given_up(place: Place) -> None:
    place.lease(0)
    place.beat(0, 1)
    place.platform.fails = True
    peers = place.peers()
    place.look(peers)
    for number in range(MAX_RESTARTS):
        place.now_s += STARTING_S + 1
        place.look(peers)
        assert get_document(place.storage, Restart, KEYS.restart("s0.r0", number)).tries == number + 1
        place.look(peers)
    assert read_halt(place.storage, KEYS) is None
    place.now_s += STARTING_S + 1
    place.look(peers)
    order = read_halt(place.storage, KEYS)
    assert order is not None
    assert order.reason == f"worker s0.r0 was started again {MAX_RESTARTS} times without a step in between"


def test_tries_are_counted_anew_when_a_step_has_ended(place: Place) -> None:
    place.lease(0)
    place.beat(0, 1)
    peers = place.peers()
    place.look(peers)
    for step in range(MAX_RESTARTS + 3):
        place.now_s += STARTING_S + 1
        place.look(peers, step=step)
        place.look(peers, step=step)
    assert read_halt(place.storage, KEYS) is None
    assert len(place.platform.invoked) == MAX_RESTARTS + 3


def test_whoever_restarts_a_worker_from_further_behind_does_not_count_its_tries_anew(place: Place) -> None:
    """A watchdog sees the step that the worker had done, its peer the one in which it waits."""
    place.lease(0)
    place.beat(0, 1)
    peers = place.peers()
    place.look(peers)
    for step in (5, 4, 5, 4, 5):
        place.now_s += STARTING_S + 1
        place.look(peers, step=step)
        place.look(peers, step=step)
    assert read_halt(place.storage, KEYS) is None
    place.now_s += STARTING_S + 1
    place.look(peers, step=4)
    assert read_halt(place.storage, KEYS) is not None
    assert len(place.platform.invoked) == MAX_RESTARTS


def test_a_successor_has_time_to_start(place: Place) -> None:
    place.lease(0)
    place.beat(0, 1)
    put_document(place.storage, KEYS.hand_over("s0.r0", 0), HandOver(step=3))
    peers = place.peers()
    for now_s in (0.0, SILENT_S + 0.1, STARTING_S):
        place.now_s = now_s
        place.look(peers)
    assert place.platform.invoked == []
    place.now_s = STARTING_S + 0.1
    place.look(peers)
    assert len(place.platform.invoked) == 1


@pytest.mark.parametrize("spent", [RunAccount(spent_usd=5.1), RunAccount(spent_usd=2.6, requests_usd=2.5)])
def test_a_run_that_has_spent_its_limit_is_ended_instead(place: Place, spent: RunAccount) -> None:
    place.lease(0)
    place.beat(0, 1)
    peers = place.peers()
    place.look(peers)
    place.now_s = SILENT_S + 0.1
    peers.check({"s0.r0"}, step=3, account=spent)
    order = read_halt(place.storage, KEYS)
    assert order is not None
    assert order.reason == "it would cost more than $5"
    assert place.platform.invoked == []


def test_notes_that_were_cut_short_count_as_there(place: Place) -> None:
    """The note of a restart, and the hand-over after which a successor has time to start."""
    place.lease(0)
    place.beat(0, 1)
    put_document(place.storage, KEYS.hand_over("s0.r0", 0), HandOver(step=3))
    put_document(place.storage, KEYS.restart("s0.r0", 0), Restart(attempt=1, step=3, tries=1))
    for key in (KEYS.hand_over("s0.r0", 0), KEYS.restart("s0.r0", 0)):
        place.storage.put(key, b"{")
    peers = place.peers()
    place.look(peers)
    place.now_s = SILENT_S + 0.1
    place.look(peers)
    assert place.platform.invoked == []
    place.now_s = STARTING_S + 0.1
    place.look(peers)
    (again,) = place.platform.invoked
    assert isinstance(again, WorkerSpec)
    assert again.attempt == 1
    assert get_document(place.storage, Restart, KEYS.restart("s0.r0", 1)).attempt == 1
