"""The losses of a worker of the last stage lie in few objects, and any reader finds each of them."""

import dataclasses
from collections import Counter
from collections.abc import Callable

import pytest

from funcpipe.core import FaultTolerance, StepReport, StepSummary
from funcpipe.core.json_form import from_text
from funcpipe.errors import CorruptMessage, FormatError, KeyMissing, Superseded
from funcpipe.platforms.base import Storage
from funcpipe.platforms.wrappers import Answer, StorageWrapper
from funcpipe.runstate.lease import FencedStorage, Lease
from funcpipe.runstate.reports import SUMMARY_POLLS, StepReader, load_reported
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.worker.step_runner import StepReporter
from tests.support.races import KEYS, SECOND, spec_of

WORKER = spec_of(SECOND, 0).worker
EVERY = 5


class Counting(StorageWrapper):
    """Counts requests by kind; `before` is called before each of them."""

    def __init__(self) -> None:
        super().__init__(MemoryStorage())
        self.requests: Counter[str] = Counter()
        self.before: Callable[[str, str], None] = lambda kind, key: None

    def _ask(self, what: str, request: Callable[[], Answer]) -> Answer:
        kind, _, key = what.partition(" ")
        self.requests[kind] += 1
        self.before(kind, key)
        return request()


@pytest.fixture
def storage() -> Counting:
    return Counting()


def report(step: int) -> StepReport:
    return StepReport(step=step, samples=4 + step % 2, loss_sum=1 / (step + 1))


def reporter(storage: Storage, attempt: int = 0) -> StepReporter:
    faults = FaultTolerance(retained_objects=2 * EVERY)
    return StepReporter(dataclasses.replace(spec_of(SECOND, attempt), faults=faults), storage, KEYS)


def train(storage: Storage, first: int, stop: int, attempt: int = 0) -> StepReporter:
    made = reporter(storage, attempt)
    for step in range(first, stop):
        made.write(report(step))
    return made


def singles(storage: Storage) -> list[int]:
    return [int(key.removeprefix(KEYS.step_reports)[:8]) for key in storage.list(KEYS.step_reports)]


def summaries(storage: Storage) -> list[str]:
    prefix = KEYS.step_summaries(WORKER)
    return [key.removeprefix(prefix) for key in storage.list(prefix)]


def expected(stop: int) -> dict[int, StepReport]:
    return {step: report(step) for step in range(stop)}


def all_found(storage: Storage, stop: int) -> bool:
    """Whether a client that comes now, and one that resumes the run, find what was reported."""
    reader = StepReader(storage, KEYS)
    seen = {step: reader.find(step, WORKER) for step in range(stop)}
    return seen == expected(stop) == load_reported(storage, KEYS, WORKER).reports


def test_a_summary_keeps_what_was_reported_whatever_the_order() -> None:
    made = StepSummary.of([report(3), report(1)])
    assert made == StepSummary(steps=(1, 3), samples=(5, 5), loss_sums=(1 / 2, 1 / 4))
    skipping = [dataclasses.replace(report(2), skipped=True), report(3)]
    assert list(StepSummary.of(skipping).reports().values()) == skipping
    assert made.reports() == {1: report(1), 3: report(3)}
    with_rates = [dataclasses.replace(report(2), learning_rate=0.1), report(3)]
    assert list(StepSummary.of(with_rates).reports().values()) == with_rates


def test_reports_of_versions_that_told_no_learning_rate_are_read() -> None:
    text = '{"format": "funcpipe.step/1", "step": 1, "samples": 5, "loss_sum": 0.5, "skipped": false}'
    assert from_text(StepReport, text, source="step") == report(1)
    text = '{"format": "funcpipe.steps/1", "steps": [1], "samples": [5], "loss_sums": [0.5], "skipped": []}'
    assert from_text(StepSummary, text, source="steps").reports() == {1: report(1)}
    with pytest.raises(FormatError, match=r"'learning_rates' must be as many as steps, or none, got 2"):
        from_text(StepSummary, text.replace("]}", '], "learning_rates": [0.1, 0.2]}'), source="steps")


def test_every_report_is_found_and_few_objects_are_left() -> None:
    wrong = []
    for stop in range(1, 4 * EVERY + 2):
        storage = Counting()
        train(storage, 0, stop)
        few = len(singles(storage)) < 2 * EVERY and len(summaries(storage)) <= 2
        wrong += [] if few and all_found(storage, stop) else [f"{stop} steps: {storage.list('')}"]
    assert wrong == []


def test_summaries_take_three_requests_each(storage: Counting) -> None:
    train(storage, 0, 10 * EVERY)
    assert storage.requests == {"put": 10 * EVERY + 10, "list": 10, "delete": 10}
    assert summaries(storage) == ["00000000.00000045", "00000000.00000050"]
    assert singles(storage) == list(range(45, 50))


def test_a_worker_that_goes_back_writes_nothing_twice(storage: Counting) -> None:
    made = train(storage, 0, 22)
    before, puts = storage.list(""), storage.requests["put"]
    for step in range(8, 22):
        made.write(report(step))
    assert storage.list("") == before
    assert storage.requests["put"] == puts


def test_a_successor_takes_over_what_was_reported(storage: Counting) -> None:
    train(storage, 0, 23)
    train(storage, 16, 31, attempt=1)
    assert summaries(storage) == ["00000001.00000025", "00000001.00000030"]
    assert singles(storage) == list(range(25, 31))
    assert all_found(storage, 31)


def test_attempts_with_few_steps_each_keep_few_objects(storage: Counting) -> None:
    for attempt in range(30):
        train(storage, 3 * attempt, 3 * attempt + 3, attempt)
        assert len(singles(storage)) < 2 * EVERY
        assert len(summaries(storage)) <= 2
    assert all_found(storage, 90)


def test_a_summary_of_a_superseded_attempt_hides_nothing(storage: Counting) -> None:
    train(storage, 0, 20)
    late = storage.get(KEYS.step_summary(WORKER, 0, 20))
    train(storage, 20, 41, attempt=1)
    storage.put(KEYS.step_summary(WORKER, 0, 99), late)
    assert all_found(storage, 41)
    train(storage, 41, 56, attempt=2)
    assert not any(key.startswith("00000000") for key in summaries(storage))
    assert all_found(storage, 56)


@pytest.mark.parametrize("until", [25, 36])
@pytest.mark.parametrize("kind", ["put", "list", "delete"])
def test_an_attempt_that_sleeps_before_a_request_takes_nothing_from_its_successor(
    storage: Counting, kind: str, until: int
) -> None:
    """It wakes up when the successor has gone on, and its lease is still fresh enough to go on itself for a while."""
    asleep = train(storage, 0, 24)

    def succeed(request: str, key: str) -> None:
        if request == kind and (kind != "put" or "losses" in key):
            storage.before = lambda request, key: None
            train(storage, 21, 46, attempt=1)

    storage.before = succeed
    for step in range(24, until):
        asleep.write(report(step))
    assert all_found(storage, 46)
    train(storage, 46, 57, attempt=2)
    assert all_found(storage, 57)


def test_a_successor_reads_again_if_a_summary_is_replaced_meanwhile(storage: Counting) -> None:
    """The attempt before goes on while its successor, that has done step 24, reads what it has reported."""
    asleep = train(storage, 0, 20)
    successor = train(storage, 18, 24, attempt=1)

    def go_on(request: str, key: str) -> None:
        if request == "get":
            storage.before = lambda request, key: None
            for step in range(20, 36):
                asleep.write(report(step))

    storage.before = go_on
    successor.write(report(24))
    assert all_found(storage, 36)


def test_a_superseded_attempt_summarises_nothing(storage: Counting) -> None:
    lease = Lease(storage, KEYS, WORKER, 0, fresh_s=0.0)
    lease.take()
    made = train(FencedStorage(storage, lease), 0, 4)
    Lease(storage, KEYS, WORKER, 1, fresh_s=0.0).take()
    with pytest.raises(Superseded):
        made.write(report(4))
    assert summaries(storage) == []


@pytest.mark.parametrize("data", [b"", b"{}\n0\n", None])
def test_no_object_that_is_lost_takes_a_deleted_report_with_it(storage: Counting, data: bytes | None) -> None:
    train(storage, 0, 23)
    before = {key: storage.get(key) for key in storage.list("")}
    assert len(before) == 10
    for key, good in before.items():
        if data is None:
            storage.delete(key)
        else:
            storage.put(key, data)
        reported = load_reported(storage, KEYS, WORKER).reports
        newest = key.startswith(KEYS.step_reports) and singles_only(key)
        assert reported.items() <= expected(23).items()
        assert len(reported) == 23 - newest, key
        if not newest:
            reader = StepReader(storage, KEYS)
            late = [step for step in range(23) if data is None or key != KEYS.step_report(step, WORKER)]
            assert all(reader.find(step, WORKER) == report(step) for step in late), key
        storage.put(key, good)


def singles_only(key: str) -> bool:
    """Whether the report lies in no summary yet."""
    return int(key.removeprefix(KEYS.step_reports)[:8]) >= 20


def test_a_successor_of_whom_a_summary_is_damaged_writes_it_whole(storage: Counting) -> None:
    train(storage, 0, 23)
    storage.put(KEYS.step_summary(WORKER, 0, 20), b"damaged")
    train(storage, 21, 31, attempt=1)
    assert all_found(storage, 31)
    assert summaries(storage) == ["00000001.00000025", "00000001.00000030"]


def test_a_client_is_told_if_a_report_can_be_read_nowhere(storage: Counting) -> None:
    train(storage, 0, 23)
    for name in summaries(storage):
        storage.put(KEYS.step_summaries(WORKER) + name, b"damaged")
    reader = StepReader(storage, KEYS)
    assert reader.find(22, WORKER) == report(22)
    with pytest.raises(CorruptMessage, match="losses"):
        reader.find(3, WORKER)


def test_a_client_that_comes_late_reads_a_summary_once(storage: Counting) -> None:
    train(storage, 0, 23)
    storage.requests.clear()
    reader = StepReader(storage, KEYS)
    assert [reader.find(step, WORKER) for step in range(23)] == [report(step) for step in range(23)]
    assert storage.requests == {"list": 1, "get": 1 + 1 + 3}  # the first look, the summary, what is not in it


def test_a_client_that_comes_late_reads_one_summary_of_each_replica(storage: Counting) -> None:
    train(storage, 0, 20)
    for key in storage.list(KEYS.step_summaries(WORKER)):
        storage.put(KEYS.step_summaries("s1.r1") + key.rpartition("/")[2], storage.get(key))
    storage.requests.clear()
    reader = StepReader(storage, KEYS)
    assert all(reader.find(step, worker) == report(step) for step in range(20) for worker in (WORKER, "s1.r1"))
    assert storage.requests == {"list": 1, "get": 4}


def test_a_client_that_waits_makes_one_request_a_poll(storage: Counting) -> None:
    train(storage, 0, 20)
    reader = StepReader(storage, KEYS)
    assert reader.find(0, WORKER) == report(0)
    storage.requests.clear()
    polls = 10 * SUMMARY_POLLS
    assert all(reader.find(20, WORKER) is None for _ in range(polls))
    assert storage.requests == {"get": polls, "list": 10}


def test_a_client_that_falls_behind_finds_what_was_deleted_meanwhile(storage: Counting) -> None:
    made, reader = train(storage, 0, 1), StepReader(storage, KEYS)
    assert reader.find(0, WORKER) == report(0)
    assert reader.find(1, WORKER) is None
    for step in range(1, 41):
        made.write(report(step))
    assert 1 not in singles(storage)
    found = next(found for _ in range(SUMMARY_POLLS) if (found := reader.find(1, WORKER)) is not None)
    assert found == report(1)
    storage.requests.clear()
    assert [reader.find(step, WORKER) for step in range(2, 41)] == [report(step) for step in range(2, 41)]
    assert storage.requests == {"get": 1}


def test_a_summary_that_is_deleted_before_it_is_read_has_the_client_look_again(storage: Counting) -> None:
    made, reader = train(storage, 0, 11), StepReader(storage, KEYS)

    def go_on(request: str, key: str) -> None:
        if request == "get" and "losses" in key:
            storage.before = lambda request, key: None
            for step in range(11, 31):
                made.write(report(step))

    storage.before = go_on
    assert reader.find(0, WORKER) is None
    assert reader.find(0, WORKER) == report(0)
    with pytest.raises(KeyMissing):
        storage.get(KEYS.step_report(0, WORKER))
