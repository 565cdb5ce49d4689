"""What a whole job is expected to take, item by item, and the limits that are refused by it before anything starts."""

from dataclasses import replace

import pytest

from funcpipe.api import FuncPipe
from funcpipe.client.prepare.job_estimate import check_limits, estimate_job
from funcpipe.client.prepare.job_shape import JobShape, job_shape
from funcpipe.client.prepare.prepared_run import prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import (
    Estimate,
    FaultTolerance,
    JobEstimate,
    JobItem,
    OptimizerKind,
    Plan,
    RunLimits,
    RunSettings,
    StageEstimate,
    StoreEstimate,
    Stores,
    Validation,
    from_text,
    to_text,
)
from funcpipe.errors import DataError, PlanError
from funcpipe.platforms.catalog import load_spec
from funcpipe.runstate.keys import Keys
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform
from tests.client.threads import RUN, STEADY, job
from tests.support.run_keys import NONCE

pytestmark = pytest.mark.usefixtures("traced")

SPEC = load_spec("aws-lambda")
SIZE = SPEC.sizes[1]
STAGE = StageEstimate(
    base_bytes=1 << 28,
    state_bytes=280_000_000,  # 70 MB of parameters, their gradients, and two moments
    activation_bytes=1 << 20,
    waste_bytes=0,
    forward_s=0.1,
    forward_upload_s=0.1,
    forward_download_s=0.1,
    backward_s=0.2,
    backward_upload_s=0.1,
    backward_download_s=0.1,
    sync_s=0.5,
)
ITERATION = Estimate(
    iteration_s=10.0,
    cost_usd=0.0,
    compute_usd=0.0,
    request_usd=0.0,
    peak_memory_bytes=1 << 29,
    puts=20,
    gets=20,
    bottleneck="stage 0 compute",
    stages=(STAGE,) * 3,
)


def plan() -> Plan:
    """The plan of the tests' job, as if it had been made for AWS Lambda."""
    made = job().plan
    stages = tuple(replace(stage, size=SIZE.name, memory_mb=SIZE.memory_mb) for stage in made.stages)
    return replace(made, stages=stages, platform=SPEC.name, estimate=ITERATION, optimizer=OptimizerKind.ADAM)


USD_S = 6 * SIZE.price_usd_s


def expected(steps: int = 100, **changes: object) -> JobEstimate:
    faults = replace(FaultTolerance(checkpoint_steps=10), **changes)  # type: ignore[arg-type]
    return estimate_job(plan(), JobShape(epochs=4, steps=steps), faults=faults)


def test_steps_start_checkpoints_and_hand_overs_add_up() -> None:
    found = expected()
    saved_s = 210e6 / SIZE.upload_bytes_s + 2 * SPEC.latency_s
    assert found.training.seconds == pytest.approx(1000.0)
    assert found.training.functions_usd == pytest.approx(1000.0 * USD_S)
    assert 3.3 + 1.0 < found.start.seconds < 3.3 + 3.0
    assert (found.start.count, found.checkpoints.count) == (6, 10)
    assert found.checkpoints.seconds == pytest.approx(10 * saved_s)
    assert found.hand_overs.count == 6  # after some 850 of 1040 s
    beside_s = found.hand_overs.functions_usd / USD_S - found.hand_overs.seconds
    assert beside_s == pytest.approx(1.5 * SPEC.cold_start_s + 2 * 10.0)
    assert found.seconds == pytest.approx(sum(item.seconds for item in found.items.values()))
    assert found.cost_usd == pytest.approx(found.functions_usd + found.requests_usd + found.traffic_usd)
    messages_usd = 100 * SPEC.request_usd(20, 20)
    assert messages_usd < found.training.requests_usd < 1.5 * messages_usd
    assert from_text(JobEstimate, to_text(found), source="test") == found


@pytest.mark.parametrize(("sync_every", "mean_s", "meetings"), [(4, 10.0, 3), ("end", 8.000008, 1), (10, 8.8, 1)])
def test_the_meetings_of_a_run_are_counted(sync_every: int | str, mean_s: float, meetings: int) -> None:
    """Ten steps of 8 s, or 16 with a meeting, the last of which ends the last round however short it is."""
    iteration = replace(ITERATION, iteration_s=mean_s, meeting_s=16.0)
    local = replace(plan(), sync_every=sync_every, estimate=iteration)
    found = estimate_job(local, JobShape(epochs=1, steps=10), faults=FaultTolerance(checkpoint_steps=10))
    assert found.training.seconds == pytest.approx((10 - meetings) * 8.0 + meetings * 16.0)
    assert found.training.functions_usd == pytest.approx(found.training.seconds * USD_S)
    summing = estimate_job(plan(), JobShape(epochs=1, steps=10), faults=FaultTolerance(checkpoint_steps=10))
    meeting_usd = 3 * 2 * (2 * SPEC.price_put_usd + 2 * 2.5 * SPEC.price_get_usd)  # of 3 stages and 2 replicas
    more = meetings - (10e-6 if isinstance(sync_every, str) else 10 / sync_every)
    assert found.training.requests_usd - summing.training.requests_usd == pytest.approx(more * meeting_usd)


def test_replicas_that_train_alone_save_their_own_parameters_and_optimiser_besides() -> None:
    """70 MB of parameters, the model's, a replica's own and two moments: 280 MB in five files, and 210 MB in four."""
    stages = tuple(replace(stage, parameter_bytes=70_000_000) for stage in plan().stages)
    local = replace(plan(), stages=stages, sync_every=4, estimate=replace(ITERATION, meeting_s=16.0))
    shape, faults = JobShape(epochs=1, steps=100), FaultTolerance(checkpoint_steps=10)
    found, alike = estimate_job(local, shape, faults=faults), expected()
    saved_s = 280e6 / SIZE.upload_bytes_s + 2 * SPEC.latency_s
    assert found.checkpoints.seconds == pytest.approx(10 * saved_s)
    more = 3 * (5 + 4 - 4)  # files of a checkpoint, each of which is read back
    more_usd = more * (SPEC.price_put_usd + 2 * SPEC.price_get_usd) + 3 * (SPEC.price_put_usd + SPEC.price_get_usd)
    assert found.checkpoints.requests_usd - alike.checkpoints.requests_usd == pytest.approx(10 * more_usd)


def test_each_store_has_its_own_prices() -> None:
    """Messages in a store by the GB, sums in one by the hour; empty requests at the price of the messages' store."""
    prices = replace(SPEC, stores=(SPEC.store("express"), SPEC.store("valkey")))
    one = StoreEstimate(
        kind="messages",
        store="express",
        puts=10,
        gets=10,
        sent_bytes=0,
        received_bytes=0,
        request_usd=0.0,
        transfer_usd=0.002,
    )
    iteration = replace(ITERATION, stores=(one, replace(one, kind="sums", store="valkey", transfer_usd=0.0)))
    mixed = replace(plan(), estimate=iteration, stores=Stores(messages="express", sums="valkey"))
    faults = FaultTolerance(checkpoint_steps=10)
    found = estimate_job(mixed, JobShape(epochs=4, steps=100), faults=faults, prices=prices)
    reports_usd = plan().replicas * SPEC.price_put_usd
    each_usd = 10 * 1.13e-6 + 25 * 3e-8 + 0.002 + reports_usd
    assert found.training.requests_usd == pytest.approx(100 * each_usd)
    assert found.hours_usd == pytest.approx(found.seconds / 3600 * SPEC.store("valkey").price_usd_h)
    parts = (found.functions_usd, found.requests_usd, found.hours_usd, found.traffic_usd)
    assert found.cost_usd == pytest.approx(sum(parts))
    assert "stores 0.0" in found.line()


def test_an_average_of_the_parameters_is_saved_too() -> None:
    shape, faults = JobShape(epochs=4, steps=100), FaultTolerance(checkpoint_steps=10)
    averaged = estimate_job(plan(), replace(shape, averaged=True), faults=faults)
    assert averaged.checkpoints.seconds - expected().checkpoints.seconds == pytest.approx(
        10 * 70e6 / SIZE.upload_bytes_s
    )


def test_parameters_are_those_that_the_plan_knows() -> None:
    stages = tuple(replace(stage, parameter_bytes=50_000_000) for stage in plan().stages)
    known = estimate_job(
        replace(plan(), stages=stages), JobShape(epochs=4, steps=100), faults=FaultTolerance(checkpoint_steps=10)
    )
    assert known.checkpoints.seconds == pytest.approx(10 * (150e6 / SIZE.upload_bytes_s + 2 * SPEC.latency_s))


def test_functions_without_a_lifetime_never_hand_over_and_short_lives_do_so_more_often() -> None:
    assert expected(steps=50).hand_overs == JobItem()
    endless = replace(SPEC, lifetime_s=None)
    shape = JobShape(epochs=1, steps=1000)
    assert estimate_job(plan(), shape, faults=FaultTolerance(), functions=endless).hand_overs == JobItem()
    assert expected(lifetime_s=200.0).hand_overs.count > expected().hand_overs.count


def test_functions_that_a_launch_rate_holds_back_are_waited_for_and_billed_from_their_own_start() -> None:
    at_once, burst, slow = (
        estimate_job(plan(), JobShape(epochs=4, steps=100), faults=FaultTolerance(), prices=prices)
        for prices in (replace(SPEC, launches_10s=most) for most in (None, 6, 2))
    )
    assert burst == at_once
    assert slow.start.seconds == pytest.approx(at_once.start.seconds + 20.0)
    waited_s = 20.0 + 20.0 + 15.0 + 10.0 + 5.0  # the functions start at 0, 0, 5, 10, 15 and 20 s
    assert slow.start.functions_usd == pytest.approx(at_once.start.functions_usd + waited_s * SIZE.price_usd_s)
    assert slow.start_parts["launch"] == pytest.approx(20.0)


def test_validation_is_forward_only_steps() -> None:
    shape = JobShape(epochs=1, steps=100, forward_steps=30, forward_step_s=2.0)
    found = estimate_job(plan(), shape, faults=FaultTolerance())
    assert (found.validation.count, found.validation.seconds) == (30, 60.0)
    assert found.validation.functions_usd == pytest.approx(60.0 * USD_S)
    guessed = estimate_job(plan(), replace(shape, forward_step_s=None), faults=FaultTolerance())
    assert guessed.validation.seconds == pytest.approx(30 * 10.0 / 3)


def test_validations_of_a_job_are_counted_in_batches() -> None:
    shape = job_shape(plan(), 24, 2, Validation(data=list(range(10)), every_steps=2))
    assert (shape.steps, shape.forward_steps) == (6, 3 * 2)
    assert job_shape(plan(), 24, 2, list(range(8))).forward_steps == 2


def test_one_line_says_it_all() -> None:
    item = JobItem(count=138, seconds=720.0, functions_usd=0.3, requests_usd=0.11)
    found = JobEstimate(platform="aws-lambda", epochs=3, steps=138, start=JobItem(), training=item)
    text = "3 epochs, 138 steps, about 12 min, $0.41 on aws-lambda (functions 0.30, requests 0.11)"
    assert found.line() == text
    assert found.line(1.0) == f"{text}, cap $1"
    assert (
        replace(found, earlier_usd=0.2)
        .line()
        .endswith("$0.61 on aws-lambda (functions 0.30, requests 0.11, so far 0.20)")
    )
    free = replace(found, training=JobItem(count=1, seconds=20.0), steps=1, epochs=1)
    assert free.line() == "1 epoch, 1 step, about 20 s, no cost on aws-lambda"


def test_the_shape_of_a_job_comes_from_samples_or_data() -> None:
    assert job_shape(plan(), 24, 2).steps == job_shape(plan(), list(range(24)), 2).steps == 6
    with pytest.raises(DataError):
        job_shape(plan(), 3, 1)


def test_a_limit_below_the_estimate_is_refused_with_the_ways_out() -> None:
    found = expected()
    check_limits(found, RunLimits(max_usd=found.cost_usd * 1.01, deadline_s=found.seconds * 1.01))
    with pytest.raises(PlanError, match=r"expected to cost more than the limit of \$0.01: 4 epochs, 100 steps.*--yes"):
        check_limits(found, RunLimits(max_usd=0.01))
    with pytest.raises(PlanError, match="expected to take 17 min, longer than the limit of 5 min"):
        check_limits(found, RunLimits(deadline_s=300.0))
    check_limits(found, RunLimits(max_usd=0.01, allow_partial=True))


def test_nothing_starts_of_a_job_that_is_expected_to_cost_too_much(
    storage: MemoryStorage, functions: ThreadPlatform
) -> None:
    own = replace(job(), plan=replace(job().plan, estimate=ITERATION))
    session = session_on(Site(functions, storage, "memory://"), reopen=functions.open)
    with pytest.raises(PlanError, match="more than the limit of"):
        prepare(own, session, faults=STEADY, limits=RunLimits(max_usd=1e-6), settings=RunSettings(name=RUN))
    assert storage.list("") == ()
    ready = prepare(own, session, faults=STEADY, limits=RunLimits(max_usd=100.0), settings=RunSettings(name=RUN))
    assert ready.estimate is not None
    assert ready.estimate.steps == 9


def test_functions_are_told_of_the_client_s_requests_and_of_all_invocations(
    storage: MemoryStorage, functions: ThreadPlatform
) -> None:
    """So that the limit counts them, even in runs that are left to themselves."""
    from funcpipe.client.follow.launch import upload

    prices = replace(functions.spec, price_invocation_usd=0.5, price_put_usd=1.0, price_get_usd=0.0)
    session = session_on(Site(functions, storage, "memory://"), reopen=functions.open)
    ready = prepare(replace(job(), prices=prices), session, faults=STEADY, settings=RunSettings(name=RUN))
    first, *_, last = list(upload(ready, Keys(RUN, 0, NONCE)))
    assert first.account.requests_usd >= 6 * 0.5 + 2
    assert last.account.requests_usd >= first.account.requests_usd + 2  # of two more stages
    assert last.account.invocation_usd == 0.5


def test_a_plan_without_an_estimate_says_so() -> None:
    pipe = FuncPipe(job().graph.module, optimizer=job().recipe.optimizer)
    with pytest.raises(PlanError, match="the plan has no estimate of an iteration by its stages"):
        pipe.estimate(24, plan=job().plan)
    assert pipe.estimate(24, epochs=2, plan=plan(), platform="local").hand_overs == JobItem()
