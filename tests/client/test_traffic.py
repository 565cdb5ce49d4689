"""What a client downloads of a run is paid for where it leaves a region: in estimate, limit and bill."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from funcpipe.client.follow.launch import launch, upload
from funcpipe.client.follow.steps import ClientBudget
from funcpipe.client.prepare.evaluation import make_evaluation
from funcpipe.client.prepare.job import Job
from funcpipe.client.prepare.job_estimate import estimate_job
from funcpipe.client.prepare.job_shape import JobShape, job_shape
from funcpipe.client.prepare.prepared_run import PreparedRun, prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import (
    Bill,
    FaultTolerance,
    JobEstimate,
    Monitor,
    OptimizerKind,
    PlatformSpec,
    RunLimits,
    RunSettings,
    Validation,
)
from funcpipe.errors import PlanError
from funcpipe.platforms.base import OPEN, Gate, Storage
from funcpipe.platforms.catalog import load_spec
from funcpipe.runstate.halt import read_halt
from funcpipe.runstate.keys import Keys
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform
from tests.client import validated
from tests.client.test_job_estimate import ITERATION, SPEC, expected, plan
from tests.client.threads import RUN, STEADY, job
from tests.support.run_keys import NONCE

pytestmark = pytest.mark.usefixtures("traced")

GIB = 1 << 30
DOLLAR_A_BYTE = replace(
    load_spec("local"),
    price_put_usd=0.0,
    price_get_usd=0.0,
    price_invocation_usd=0.0,
    price_traffic_usd_gb=float(GIB),
    sizes=tuple(replace(size, price_usd_s=0.0) for size in load_spec("local").sizes),
)


class Outside(MemoryStorage):
    """The same objects as the functions', through which only the client reads, and which counts what it reads."""

    def __init__(self, inside: MemoryStorage) -> None:
        self.__dict__ = inside.__dict__.copy()
        self.read_bytes = 0

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        data = super().get(key, start=start, stop=stop, gate=gate)
        self.read_bytes += len(data)
        return data


def ready(client: Storage, platform: ThreadPlatform, made: Job, limits: RunLimits | None = None) -> PreparedRun:
    session = session_on(Site(platform, client, "memory://"), reopen=platform.open)
    own, faults = replace(made, prices=platform.spec), replace(STEADY, keep=True, heartbeat_s=5.0)
    return prepare(own, session, faults=faults, limits=limits or RunLimits(), settings=RunSettings(name=RUN))


def sites(prices: PlatformSpec = DOLLAR_A_BYTE) -> tuple[Outside, ThreadPlatform]:
    storage = MemoryStorage()
    return Outside(storage), ThreadPlatform(prices, storage)


def test_the_bill_has_every_byte_that_the_client_reads_and_none_that_it_sends_or_functions_move() -> None:
    client, platform = sites()
    bill = launch(ready(client, platform, job())).bill
    assert client.read_bytes > 10_000
    assert bill.traffic_usd == pytest.approx(client.read_bytes)
    assert bill.cost_usd == pytest.approx(client.read_bytes)
    assert bill.client.sent_bytes > 0
    assert sum(item.requests.received_bytes for item in bill.stores) > client.read_bytes


def test_a_bill_of_an_earlier_version_has_no_traffic() -> None:
    old = Bill(platform="aws", functions=1, function_seconds=1.0, puts=5, gets=7, compute_usd=0.5, request_usd=0.25)
    assert (old.traffic_usd, old.cost_usd) == (0.0, 0.75)


def test_progress_tells_of_the_traffic_too() -> None:
    client, platform = sites()
    seen: list[float] = []
    bill = launch(ready(client, platform, job()), lambda told: seen.append(told.cost_usd)).bill
    assert 0 < seen[0] < seen[-1] <= bill.cost_usd


def test_an_estimate_has_the_trained_model_with_what_its_optimiser_keeps() -> None:
    """Three stages of 70 MB of parameters, each with two moments of Adam's: 630 MB."""
    found = expected()
    learned_usd = 3 * 3 * 70e6 / GIB * 0.09
    assert learned_usd < found.traffic_usd < 1.02 * learned_usd
    parts = found.functions_usd + found.requests_usd + found.traffic_usd
    assert found.cost_usd == pytest.approx(parts)
    assert "traffic 0.053)" in found.line()


def test_where_nothing_leaves_a_region_no_traffic_is_told_of() -> None:
    free = replace(SPEC, price_traffic_usd_gb=0.0)
    found = estimate_job(plan(), JobShape(epochs=4, steps=100), faults=FaultTolerance(), prices=free)
    assert found.traffic_usd == 0.0
    assert "traffic" not in found.line()


def test_a_divided_optimiser_s_state_is_downloaded_once_and_the_model_too() -> None:
    stages = tuple(replace(stage, parameter_bytes=70_000_000) for stage in plan().stages)
    whole = replace(plan(), stages=stages)
    shape, faults = JobShape(epochs=4, steps=100), FaultTolerance()
    divided = estimate_job(replace(whole, shard_optimizer=True), shape, faults=faults)
    assert divided.traffic_usd == pytest.approx(estimate_job(whole, shape, faults=faults).traffic_usd, rel=0.01)


class Adapted(nn.Module):
    """A frozen layer of 4 MB and a trained one of 1 KB."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(1000, 1000, bias=False).requires_grad_(False)
        self.own = nn.Linear(256, 1, bias=False)


def test_frozen_weights_are_not_downloaded_and_others_once_more_if_the_best_model_is_kept() -> None:
    adam = replace(plan(), optimizer=OptimizerKind.ADAM)
    model, data = Adapted(), [(torch.zeros(1), torch.zeros(1))] * 24
    assert job_shape(adam, 24, 2, model=model).collected_bytes == 3 * 1024
    averaged = job_shape(adam, 24, 2, model=model, averaged=True).collected_bytes
    assert averaged == 4 * 1024
    best = job_shape(adam, 24, 2, Validation(data=data), model=model).collected_bytes
    assert best == (3 + 1) * 1024
    none = job_shape(adam, 24, 2, Validation(data=data, keep_best=False), model=model).collected_bytes
    assert none == 3 * 1024


def estimated(found: PreparedRun) -> JobEstimate:
    assert found.estimate is not None
    return found.estimate


def planned(made: Job, **changes: Any) -> Job:
    """The job with an estimate in its plan."""
    stages = ITERATION.stages[:1] * len(made.plan.stages)
    iteration = replace(ITERATION, stages=stages, iteration_s=0.01)
    return replace(made, plan=replace(made.plan, estimate=iteration, **changes))


def test_what_is_expected_is_near_what_a_client_downloads() -> None:
    """Of the model; records and traces, here most of it, are some KB of each worker, whatever it trains."""
    client, platform = sites()
    made = ready(client, platform, planned(job()))
    learned = sum(t.nbytes for stage in made.stages for t in stage.tensors.values())
    values = 1 + job().plan.optimizer.values_per_parameter
    assert made.collected_bytes == pytest.approx(values * learned)
    bill = launch(made).bill
    assert 0.3 < estimated(made).traffic_usd / bill.traffic_usd < 3


def predicting() -> Job:
    made, model = validated.job(Validation(data=validated.held_out())), validated.net()
    nothing = Monitor(keep_best=0)
    evaluation = make_evaluation(
        *(model, validated.held_out(), made.plan),
        loss=None,
        metrics={},
        blocks=(),
        monitor=nothing,
        keep_outputs=True,
    )
    return replace(made, graph=evaluation.graph, samples=made.plan.global_batch, epochs=0, evaluation=evaluation)


def test_outputs_that_a_model_predicts_are_downloaded() -> None:
    client, platform = sites()
    made = ready(client, platform, predicting())
    outputs = validated.HELD_OUT * 4 * 8  # four logits in double precision
    assert made.collected_bytes == outputs
    assert launch(made).bill.traffic_usd > outputs


def test_a_limit_that_the_download_exceeds_is_refused_before_anything_starts() -> None:
    client, platform = sites()
    with pytest.raises(PlanError, match=r"expected to cost more than the limit of \$1: .*traffic"):
        ready(client, platform, planned(job()), RunLimits(max_usd=1.0))
    assert client.list("") == ()


def test_functions_are_told_what_the_download_will_cost() -> None:
    """So that they end a run that its client could not fetch any more (`tests/worker/test_progress.py`)."""
    made = ready(*sites(), job())
    assert {spec.account.collect_usd for spec in upload(made, Keys(RUN, 0, NONCE))} == {made.collected_bytes}


def test_the_client_leaves_room_for_the_download() -> None:
    """A function costs nothing here, and so does a step that has been ordered to be the last."""
    client, platform = sites()
    made = ready(client, platform, replace(job(), epochs=50), RunLimits(max_usd=2000.0))
    keys = Keys(RUN, 0, NONCE)
    budget, left_usd = ClientBudget(made, keys), 2000.0 - made.collected_bytes
    assert 0 < left_usd < 1000
    budget.keep(left_usd - 1, done=3, step_s=1.0)
    assert read_halt(made.storage, keys) is None
    budget.keep(left_usd + 1, done=3, step_s=1.0)
    halt = read_halt(made.storage, keys)
    assert halt is not None
    assert halt.reason == "it would cost more than $2000"
