"""The bill has every request that a run causes, as the storage itself counts them."""

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from funcpipe.client.follow.launch import launch
from funcpipe.client.follow.results import Progress, RunResult
from funcpipe.client.prepare.job import Job
from funcpipe.client.prepare.prepared_run import PreparedRun, prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import Bill, FaultTolerance, Heartbeat, Outcome, RequestCounts, RunLimits, RunSettings
from funcpipe.errors import RunHalted
from funcpipe.platforms.base import OPEN, Gate
from funcpipe.platforms.catalog import load_spec
from funcpipe.platforms.wrappers import Answer, StorageWrapper
from funcpipe.runstate.documents import get_document
from funcpipe.runstate.signing import signed
from funcpipe.testing.faults import FunctionFaults
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform
from funcpipe.worker import hand_over
from tests.client.threads import RUN, job, smaller_job

pytestmark = pytest.mark.usefixtures("traced")

VICTIM = "s1.r0"
STEADY = FaultTolerance(heartbeat_s=0.1, lease_s=30.0, checkpoint_steps=2)
PRICES = replace(load_spec("local"), price_put_usd=5e-6, price_get_usd=4e-7, price_invocation_usd=0.0)


class Counting(StorageWrapper):
    """Counts each request by itself, whoever makes it, and keeps the last heartbeat of the victim's first attempt."""

    def __init__(self) -> None:
        super().__init__(MemoryStorage())
        self.watches = False
        self.asked: Counter[str] = Counter()
        self.last = MemoryStorage()
        self.told = RequestCounts()
        self._count = threading.Lock()

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        super().put(key, data, if_absent=if_absent, gate=gate)
        if f"/heartbeats/{VICTIM}/00000000" in key:
            self.last.put(key, data)
            self.told = get_document(signed(self.last), Heartbeat, key).requests

    def wait(self, key: str, timeout_s: float, cancel: threading.Event) -> None:
        cancel.wait(min(timeout_s, 0.02))

    def _ask(self, what: str, request: Callable[[], Answer]) -> Answer:
        with self._count:
            self.asked["puts" if what.startswith("touch ") else f"{what.partition(' ')[0]}s"] += 1
        return request()

    @property
    def billed(self) -> dict[str, int]:
        """What is paid for: deletions are not."""
        return {kind: count for kind, count in self.asked.items() if kind != "deletes"}


@pytest.fixture
def storage() -> Counting:
    return Counting()


def prepared(
    storage: Counting,
    functions: ThreadPlatform,
    *,
    made: Job | None = None,
    epochs: int = 1,
    faults: FaultTolerance = STEADY,
    limits: RunLimits | None = None,
) -> PreparedRun:
    own = replace(made or job(), epochs=epochs, prices=functions.spec)
    session = session_on(Site(functions, storage, "memory://"), reopen=functions.open)
    return prepare(own, session, faults=faults, limits=limits or RunLimits(), settings=RunSettings(name=RUN))


def billed(bill: Bill) -> dict[str, int]:
    return {"puts": bill.puts, "lists": bill.lists, "gets": bill.gets}


def priced(result: RunResult, storage: Counting) -> None:
    """The bill's dollars are those of the requests in it."""
    asked = storage.asked
    expected = (asked["puts"] + asked["lists"]) * 5e-6 + asked["gets"] * 4e-7
    assert result.bill.request_usd == pytest.approx(expected)


def test_the_bill_of_a_run_has_all_its_requests(storage: Counting) -> None:
    functions = ThreadPlatform(PRICES, storage)
    seen: list[Progress] = []
    result = launch(prepared(storage, functions), seen.append)
    asked = storage.billed
    assert billed(result.bill) == asked
    priced(result, storage)
    assert min(result.bill.client.puts, result.bill.client.lists, result.bill.client.gets) > 0
    assert storage.list("") == ()
    assert 0 < seen[0].cost_usd <= seen[-1].cost_usd <= result.bill.cost_usd + 1e-9


def test_the_bill_of_a_run_whose_functions_hand_over_has_all_requests_of_all_attempts(
    storage: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hand_over, "leaves_at_s", lambda *_: 0.0)  # after one step each
    functions = ThreadPlatform(PRICES, storage)
    result = launch(prepared(storage, functions, faults=replace(STEADY, lifetime_s=600.0)))
    assert sum(report.outcome is Outcome.HANDED_OVER for report in result.workers) == (len(result.losses) - 1) * 6
    assert billed(result.bill) == storage.billed
    priced(result, storage)


def test_a_function_that_dies_is_billed_for_the_requests_of_its_last_heartbeat(storage: Counting) -> None:
    killed = 2  # the first attempt of the victim
    functions = ThreadPlatform(
        PRICES,
        storage,
        faults_of=lambda number: FunctionFaults(killed_at=60 if number == killed else None),
    )
    result = launch(prepared(storage, functions))
    died = functions.counts_of(f"function {killed}")
    assert [(report.worker, report.attempt) for report in result.workers if report.worker == VICTIM] == [(VICTIM, 1)]
    assert 0 < storage.told.gets <= died.gets
    missing = {"puts": died.puts, "lists": died.lists, "gets": died.gets}
    for kind, count in missing.items():
        assert storage.asked[kind] - billed(result.bill)[kind] == count - getattr(storage.told, kind)


def test_a_run_is_ended_before_its_requests_cost_too_much(storage: Counting) -> None:
    dear = replace(PRICES, price_put_usd=3.0)
    functions = ThreadPlatform(dear, storage)
    with pytest.raises(RunHalted, match=r"it would cost more than \$1500"):
        launch(prepared(storage, functions, made=smaller_job(replicas=1), epochs=100, limits=RunLimits(max_usd=1500.0)))
    spent_usd = 3.0 * (storage.asked["puts"] + storage.asked["lists"])
    assert 750 < spent_usd < 3000  # 300 steps would cost some 10,000 dollars
