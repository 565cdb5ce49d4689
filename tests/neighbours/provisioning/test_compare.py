"""All ways beside each other, on a small profile: limits are kept, reasons are told, figures add up."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from funcpipe.core import (
    MB,
    LayerProfile,
    ModelProfile,
    OptimizerKind,
    Stores,
    TrainingSpec,
    from_text,
    to_text,
)
from funcpipe.core.accelerator import Work
from funcpipe.core.loss_model import InverseLoss
from funcpipe.core.provision import JobSpec, Provision, ProvisionTable
from funcpipe.errors import InvalidValue
from funcpipe.neighbours.provisioning import workload
from funcpipe.neighbours.provisioning.compare import (
    ORACLES,
    WAYS,
    compare,
    draw,
    fronts,
    provision_inputs,
    provision_table,
    undominated,
)
from funcpipe.neighbours.provisioning.cynthia import Mode, predict
from funcpipe.neighbours.provisioning.goal import Goal
from funcpipe.neighbours.provisioning.without_server import iteration_s
from funcpipe.platforms.catalog import load_market, load_spec
from tests.support.plans import chain_profile

SPEC = load_spec("aws-lambda")
MARKET = load_market("aws")


def profile(*, parameter_mb: float = 10, vcpu_s: float = 0.1) -> ModelProfile:
    """Four equal layers that take `vcpu_s` of one processor for a sample, forward and backward together."""
    layers = tuple(
        LayerProfile(
            name=f"layer{i}",
            parameter_bytes=int(parameter_mb * 1e6 / 4),
            activation_bytes=8 * MB,
            forward_s=tuple(4 * vcpu_s / 12 / size.vcpu for size in SPEC.sizes),
            backward_s=tuple(4 * vcpu_s / 6 / size.vcpu for size in SPEC.sizes),
            input_bytes=40_000 if i == 0 else 0,
        )
        for i in range(4)
    )
    return chain_profile(layers, SPEC, sent_bytes=10**5, micro_batch=4, base_memory_bytes=300 * MB)


def job_of(**changed: float | None) -> JobSpec:
    values: dict[str, float | None] = {"samples": 20_000, "global_batch": 64, "epochs": 2, **changed}
    return JobSpec(**values)  # type: ignore[arg-type]


def by_way(table: ProvisionTable) -> dict[str, Provision]:
    return {one.way: one for one in table.provisions}


@pytest.fixture(scope="module")
def table() -> ProvisionTable:
    return provision_table(profile(), job_of(deadline_s=3600))


def test_the_profile_s_rate_is_that_of_its_processors() -> None:
    work = workload.model_workload(profile(), SPEC, OptimizerKind.SGD)
    assert work.vcpu_s_per_sample == pytest.approx(0.1, rel=1e-6)
    machine = MARKET.machine("c7i.2xlarge")
    assert iteration_s(machine, MARKET, work, 64) == pytest.approx(64 * 0.1 / 8)
    functions = workload.function_workload(work, profile(), SPEC, job_of())
    assert functions.rate_slope * 4096 + functions.rate_base == pytest.approx(2.3154 / 0.1, rel=1e-3)
    assert work.batch_in(work.fixed_mb + 33 * work.sample_memory_mb) == 32


def test_gpus_are_as_fast_for_a_model_as_the_roofline_says() -> None:
    work = Work(flop=4 * 10**12, dense_bytes=10**9, other_bytes=10**9)
    counted = replace(
        profile(), layers=tuple(replace(one, forward_work=work, backward_work=work) for one in profile().layers)
    )
    market = workload.at_roofline(MARKET, counted, SPEC)
    speeds = {gpu.name: gpu.vcpu_equivalents for gpu in market.gpus}
    for name, tflop_s in (("T4", 8.1), ("V100", 15.7)):  # bound by arithmetic, then a GB at half the rate of memory
        bytes_s = 0.5e9 * {"T4": 320, "V100": 900}[name]
        device_s = 8 * (4 / 0.9 / tflop_s + 1e9 / bytes_s)
        assert speeds[name] == pytest.approx(4 * 0.1 / device_s, rel=1e-6)  # a micro-batch of 4 takes a vCPU 0.4 s
    assert provision_inputs(counted, job_of(), spec=SPEC).market == market
    assert provision_inputs(counted, job_of(), spec=SPEC, market=MARKET).market == MARKET
    assert provision_inputs(profile(), job_of(), spec=SPEC).market == MARKET  # nothing was counted


def test_functions_with_gpus_alone_say_how_fast_processors_are() -> None:
    """An H100 counts as 590 processors; all of them are as fast as its published rates allow."""
    work = Work(flop=4 * 10**12, dense_bytes=10**9, other_bytes=10**9)
    layers = tuple(replace(one, forward_work=work, backward_work=work) for one in profile().layers)
    spec = load_spec("modal")
    on_gpus = replace(profile(), layers=layers).on_sizes(spec.name, spec.sizes)
    seconds = 8 * (4 / 0.9 / 495 + 1 / 0.5 / 3350)
    found = workload.model_workload(on_gpus, spec, OptimizerKind.SGD)
    assert found.vcpu_s_per_sample == pytest.approx(590 * seconds / 4, rel=1e-6)
    table = provision_table(on_gpus, job_of(), spec=spec, ways=("one-machine", "lambdadnn"))
    assert [one.way for one in table.provisions] == ["one-machine"]
    assert ["have GPUs" in refusal.reason for refusal in table.refusals] == [True]


def test_every_way_is_there_once_and_the_cheapest_is_first(table: ProvisionTable) -> None:
    assert {one.way for one in table.provisions} | {one.way for one in table.refusals} == set(WAYS)
    assert [one.usd for one in table.provisions] == sorted(one.usd for one in table.provisions)
    assert from_text(ProvisionTable, to_text(table), source="x") == table


def test_the_recommended_way_is_the_cheapest_that_is_sure_enough(table: ProvisionTable) -> None:
    sure = [one for one in table.provisions if one.miss_chance is not None and one.miss_chance <= 0.05 + 1e-6]
    assert table.recommended == min(sure, key=lambda one: one.usd).way
    for way, one in by_way(table).items():
        assert way == "naive" or one.seconds <= 3600


def test_bills_add_up_and_curves_end_with_the_job(table: ProvisionTable) -> None:
    for one in table.provisions:
        assert one.usd == pytest.approx(sum(item.usd for item in one.cost))
        assert one.curve[0].done == 0
        assert [one.curve[-1].time_s, one.curve[-1].usd] == pytest.approx([one.seconds, one.usd])
        spent = [point.usd for point in one.curve]
        assert spent == sorted(spent)


def test_one_machine_is_the_cheapest_of_all_that_make_it(table: ProvisionTable) -> None:
    """Priced here once more, from the market alone."""
    chosen = by_way(table)["one-machine"]
    prices = []
    for machine in MARKET.machines:
        seconds = 120 + 2 * 20_000 * 0.1 / MARKET.compute_vcpu(machine)
        seconds += 625 * 2 * machine.gpus * 10 / machine.pcie_mb_s if machine.gpus > 1 else 0
        if seconds <= 3600 / (1 + 1.645 * 0.05):
            prices += [seconds / 3600 * usd for usd in (machine.on_demand_usd_h, machine.spot_usd_h) if usd]
    assert chosen.usd == pytest.approx(min(prices), rel=1e-3)


@pytest.mark.parametrize("mode", list(Mode))
def test_a_server_beside_one_machine_is_no_faster_than_the_machine_alone(mode: Mode) -> None:
    """GPUs of a machine exchange gradients in both."""
    work = workload.model_workload(profile(parameter_mb=1000), SPEC, OptimizerKind.SGD)
    job, server = job_of(), workload.server_type(MARKET)
    cluster, types = workload.cluster_workload(work, job), workload.worker_types(work, MARKET)
    assert any(kind.exchange_s > 0 for kind in types)
    for kind in types:
        found = predict(kind, 1, 1, work=cluster, server=server, mode=mode, goal=Goal(job=job))
        alone_s = iteration_s(MARKET.machine(kind.name), MARKET, work, job.global_batch)
        assert found.seconds / found.iterations >= alone_s * (1 - 1e-9)


def test_a_tight_deadline_is_refused_with_the_fastest_there_is() -> None:
    found = provision_table(profile(), job_of(deadline_s=20), ways=("funcpipe", "one-machine", "spotdnn"))
    assert not found.provisions
    assert found.recommended is None
    reasons = {one.way: one.reason for one in found.refusals}
    assert "cannot be met, the fastest of the machines of the market takes" in reasons["one-machine"]
    assert "no plan meets the deadline" in reasons["funcpipe"]


def test_a_budget_binds_and_without_a_deadline_buys_speed() -> None:
    poor = provision_table(profile(), job_of(budget_usd=0.001), ways=("one-machine", "cynthia-bsp"))
    assert not poor.provisions
    assert all("the budget is 0.00" in one.reason for one in poor.refusals)
    cheap, fast = (
        by_way(provision_table(profile(), job_of(budget_usd=budget), ways=("one-machine", "funcpipe")))
        for budget in (0.5, 5.0)
    )
    for way in ("one-machine", "funcpipe"):
        assert fast[way].seconds < cheap[way].seconds
        assert cheap[way].usd <= 0.5
        assert fast[way].usd <= 5.0


def test_the_whole_job_of_a_plan_is_within_the_deadline_with_starts_and_hand_overs() -> None:
    found = by_way(provision_table(profile(), job_of(deadline_s=3600), ways=("funcpipe",)))["funcpipe"]
    assert found.plan is not None
    assert found.plan.estimate is not None
    assert found.plan.estimate.iteration_s * 625 < found.seconds <= 3600
    assert found.start_s > 0


def test_a_target_loss_needs_a_model_and_its_uncertainty_counts() -> None:
    with_loss = job_of(epochs=None, target_loss=0.8, deadline_s=3600)
    bare = provision_table(profile(), with_loss, ways=("one-machine", "spotdnn"))
    assert all("no loss model says how long that takes" in one.reason for one in bare.refusals)
    exact = InverseLoss(scale=300, floor=0.3, batch=64)
    vague = replace(exact, covariance=((900.0, 0.0), (0.0, 0.0025)))
    times = []
    for loss in (exact, vague):
        found = by_way(provision_table(profile(), with_loss, loss=loss, ways=("one-machine",)))["one-machine"]
        assert found.iterations == pytest.approx(600)
        assert found.curve[-1].loss == pytest.approx(0.8)
        times.append(found.spread)
    assert times == pytest.approx([0.05, math.hypot(0.05, 0.1, 0.1)])
    out_of_reach = provision_table(profile(), job_of(epochs=None, target_loss=0.2), loss=exact)
    assert all("out of reach" in one.reason for one in out_of_reach.refusals)


def test_asynchronous_ways_need_more_steps_the_more_workers() -> None:
    job, loss = job_of(epochs=None, target_loss=0.8), InverseLoss(scale=300, floor=0.3, batch=64)
    found = by_way(provision_table(profile(), job, loss=loss, ways=("cynthia-asp", "cynthia-bsp")))
    assert found["cynthia-asp"].iterations == pytest.approx(600 * math.sqrt(found["cynthia-asp"].rented[0].count))
    assert found["cynthia-bsp"].iterations == pytest.approx(600)


def test_a_model_too_large_for_one_function_is_cut_by_funcpipe_alone() -> None:
    found = provision_table(profile(parameter_mb=6000), job_of(), ways=("funcpipe", "lambdadnn", "siren-like"))
    assert [one.way for one in found.provisions] == ["funcpipe"]
    assert all("cut the model" in one.reason for one in found.refusals)


def test_oracles_are_no_dearer() -> None:
    small = replace(MARKET, machines=tuple(replace(one, quota=2) for one in MARKET.machines))
    job = job_of(deadline_s=1800)
    found = by_way(
        provision_table(profile(), job, market=small, count_server=True, ways=("lambdadnn", "spotdnn", *ORACLES))
    )
    assert found["exhaustive-functions"].usd <= found["lambdadnn"].usd * (1 + 1e-9)
    assert found["exhaustive-spot"].usd <= found["spotdnn"].usd * (1 + 1e-9)


def test_fronts_fall_and_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    inputs = provision_inputs(profile(), job_of(deadline_s=3600))
    table = provision_table(profile(), job_of(deadline_s=3600), ways=("funcpipe", "lambdadnn", "one-machine"))
    found = fronts(inputs, table)
    assert found.keys() == by_way(table).keys()
    for front in found.values():
        assert [one.usd for one in front] == sorted((one.usd for one in front), reverse=True)
        assert undominated(front) == front
    draw(table, found, tmp_path / "ways.png")
    assert (tmp_path / "ways.png").stat().st_size > 10_000


def test_what_is_wrong_is_told() -> None:
    with pytest.raises(InvalidValue, match="ways must be some of funcpipe, here, lambdadnn"):
        provision_table(profile(), job_of(), ways=("magic",))
    with pytest.raises(InvalidValue, match="or target_loss must be given, and only one"):
        job_of(target_loss=0.5)
    with pytest.raises(InvalidValue, match="miss_chance must be below 1"):
        job_of(miss_chance=1.0)
    (refusal,) = provision_table(profile(), job_of(), ways=("exhaustive-spot",)).refusals
    assert "combinations are too many; lower the quotas" in refusal.reason


def test_our_own_way_pays_for_the_hours_of_stores() -> None:
    training = TrainingSpec(global_batch=64, replicas=(2,), stores=Stores(messages="valkey", sums="valkey"))
    inputs = provision_inputs(profile(), job_of(), training=training)
    (ours,) = compare(inputs, ["funcpipe"]).provisions
    assert ours.plan is not None
    job = inputs.estimate(ours.plan, round(ours.iterations))
    (hours_usd,) = [item.usd for item in ours.cost if item.name == "stores"]
    assert hours_usd == pytest.approx(ours.seconds / 3600 * 0.2496)  # the server's price for an hour
    assert ours.usd == pytest.approx(job.cost_usd)
