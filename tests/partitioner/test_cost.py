"""The cost model against numbers worked out by hand."""

from dataclasses import replace

import pytest

from funcpipe.core import (
    LayerProfile,
    ModelProfile,
    OptimizerKind,
    Plan,
    ScheduleKind,
    Stage,
    Sync,
    TensorProfile,
    Wire,
)
from funcpipe.errors import PlanError
from funcpipe.partitioner.cost.evaluate import check_memory, evaluate
from funcpipe.partitioner.cost.sync_time import sync_time_s
from tests.partitioner.instances import MB, platform

SPEC = replace(
    platform(2),
    sizes=(
        replace(platform(2).sizes[0], upload_bytes_s=10e6, download_bytes_s=10e6, price_usd_s=1e-5),
        replace(platform(2).sizes[1], upload_bytes_s=20e6, download_bytes_s=20e6, price_usd_s=2e-5),
    ),
    latency_s=0.5,
)


def layer(name: str, forward_s: float, *, parameters: int = 8_000_000) -> LayerProfile:
    return LayerProfile(
        name=name,
        parameter_bytes=parameters,
        activation_bytes=3_000_000,
        forward_s=(forward_s, forward_s / 2),
        backward_s=(2 * forward_s, forward_s),
        constant_bytes=1000,
        input_bytes=700,
    )


PROFILE = ModelProfile(
    model="three",
    micro_batch=2,
    platform="test",
    sizes=("1024MB", "2048MB"),
    base_memory_bytes=100,
    layers=(layer("a", 1.0), layer("b", 2.0), layer("c", 4.0)),
    tensors=(
        TensorProfile(name="ab", producer=0, consumers=(1, 2), forward_bytes=5_000_000, backward_bytes=10_000_000),
        TensorProfile(name="bc", producer=1, consumers=(2,), forward_bytes=20_000_000, backward_bytes=0),
    ),
)


def plan(*cuts: tuple[int, int, str, bool], replicas: int = 1, batch: int = 8, sync: Sync = Sync.PIPELINED) -> Plan:
    stages = tuple(
        Stage(first=first, stop=stop, size=size, memory_mb=int(size[:-2]), recompute=again)
        for first, stop, size, again in cuts
    )
    return Plan(
        global_batch=batch,
        micro_batch=2,
        replicas=replicas,
        schedule=ScheduleKind.GPIPE,
        sync=sync,
        wire=Wire.FP32,
        stages=stages,
    )


@pytest.mark.parametrize(("sharded", "copies"), [(False, 2 + 2 + 1), (True, 2 + 1 + 1)])
def test_an_average_takes_the_memory_of_one_more_copy_of_the_parameters(sharded: bool, copies: int) -> None:
    both = replace(plan((0, 3, "1024MB", False), replicas=2), optimizer=OptimizerKind.ADAM, shard_optimizer=sharded)
    without, averaged = evaluate(both, PROFILE, SPEC), evaluate(replace(both, averaged=True), PROFILE, SPEC)
    assert averaged.peak_memory_bytes - without.peak_memory_bytes == 24_000_000
    assert replace(both, averaged=True).values_per_parameter == copies - 2


def test_one_stage_computes_and_nothing_else() -> None:
    estimate = evaluate(plan((0, 3, "1024MB", False)), PROFILE, SPEC)
    assert estimate.iteration_s == pytest.approx(4 * (7 + 14))
    assert estimate.cost_usd == pytest.approx(84 * 1e-5)
    assert (estimate.puts, estimate.gets, estimate.request_usd) == (0, 0, 0)
    assert estimate.peak_memory_bytes == 100 + 2 * 24_000_000 + 3000 + int(1.125 * 4 * 9_000_000)
    assert estimate.bottleneck == "stage 0 compute"


def test_three_stages_with_a_skip_connection() -> None:
    estimate = evaluate(plan((0, 1, "1024MB", False), (1, 2, "1024MB", False), (2, 3, "2048MB", False)), PROFILE, SPEC)
    first, second, third = estimate.stages
    # tensor ab goes as one object to both later stages; its gradients come back from each of them
    assert (first.forward_s, first.forward_upload_s, first.forward_download_s) == pytest.approx((1, 0.5 + 0.5, 0))
    assert (second.forward_s, second.forward_upload_s, second.forward_download_s) == pytest.approx((2, 2.5, 1.0))
    assert (third.forward_s, third.forward_upload_s) == pytest.approx((2, 0))
    assert third.forward_download_s == pytest.approx(25e6 / 20e6 + 2 * 0.5)
    assert (first.backward_s, first.backward_upload_s) == pytest.approx((2, 0))
    assert first.backward_download_s == pytest.approx(2 * (1.0 + 0.5))
    # tensor bc has no gradient: the third stage answers the first stage alone
    assert (second.backward_upload_s, second.backward_download_s) == pytest.approx((1.5, 0))
    assert (third.backward_upload_s, third.backward_download_s) == pytest.approx((1.0, 0))
    forward_s = (2 + 5.5 + 4.25) + 3 * 2.5
    backward_s = (5 + 5.5 + 5) + 3 * 4
    assert estimate.iteration_s == pytest.approx(forward_s + backward_s)
    assert (estimate.puts, estimate.gets) == (4 * (1 + 1 + 1 + 1), 4 * (1 + 2 + 2))
    assert estimate.compute_usd == pytest.approx((1e-5 + 1e-5 + 2e-5) * estimate.iteration_s)
    assert estimate.request_usd == pytest.approx(16 * 5e-6 + 20 * 4e-7)


def test_a_late_stage_with_many_parameters_holds_up_the_end() -> None:
    heavy = replace(PROFILE, layers=(*PROFILE.layers[:2], layer("c", 4.0, parameters=800_000_000)))
    estimate = evaluate(plan((0, 2, "1024MB", False), (2, 3, "1024MB", False), replicas=2), heavy, SPEC)
    sync_s = 2 * 800e6 / 10e6 + 4 * 0.5
    assert estimate.stages[1].sync_s == pytest.approx(sync_s)
    # both tensors go to the same stage: one object of 25 MB
    forward_s = (3 + 3.0) + (4 + 3.0) + 1 * 4
    assert estimate.iteration_s == pytest.approx(forward_s + (8 + 1.5) + 1 * 8 + sync_s)
    assert estimate.bottleneck == "stage 1 synchronisation"
    assert estimate.puts == 4 * 2 + 2 * 2 * 2
    assert estimate.gets == 4 * 2 + 2 * 2 * 2 * 1


def test_recomputation_keeps_inputs_only_and_computes_forward_again() -> None:
    kept = evaluate(plan((0, 1, "1024MB", False), (1, 3, "1024MB", False)), PROFILE, SPEC)
    again = evaluate(plan((0, 1, "1024MB", False), (1, 3, "1024MB", True)), PROFILE, SPEC)
    assert kept.stages[1].activation_bytes == 4 * (6_000_000 + 5_000_000)  # what it computes, and what it received
    assert again.stages[1].activation_bytes == 4 * (5_000_000 + 1400) + 6_000_000
    assert again.stages[1].backward_s == pytest.approx(kept.stages[1].backward_s + 6)
    assert again.stages[1].forward_s == kept.stages[1].forward_s


def test_a_stage_keeps_its_own_copy_of_what_another_stage_saved_first() -> None:
    first, second = PROFILE.tensors
    shared = (replace(first, saved_by=(0, 1, 2)), replace(second, saved_by=(2,)))
    layers = tuple(replace(x, workspace_bytes=i * 1_000_000) for i, x in enumerate(PROFILE.layers))
    profile = replace(PROFILE, layers=layers, tensors=shared)
    apart = evaluate(plan((0, 1, "1024MB", False), (1, 3, "1024MB", False)), profile, SPEC).stages
    # tensor ab counts with layer a; the second stage holds it once more, for b and c together; bc counts with c
    assert apart[0].activation_bytes == 4 * 3_000_000
    assert apart[1].activation_bytes == 4 * (6_000_000 + 5_000_000) + 2_000_000
    together = evaluate(plan((0, 3, "1024MB", False)), profile, SPEC).stages
    assert together[0].activation_bytes == 4 * 9_000_000 + 2_000_000
    again = evaluate(plan((0, 1, "1024MB", False), (1, 3, "1024MB", True)), profile, SPEC).stages
    assert again[1].activation_bytes == 4 * (5_000_000 + 1400) + 6_000_000 + 2_000_000


@pytest.mark.parametrize(
    ("kind", "copies"), [(OptimizerKind.SGD, 2), (OptimizerKind.MOMENTUM, 3), (OptimizerKind.ADAM, 4)]
)
def test_copies_of_the_parameters(kind: OptimizerKind, copies: int) -> None:
    alone = replace(plan((0, 3, "1024MB", False)), optimizer=kind)
    assert evaluate(alone, PROFILE, SPEC).stages[0].state_bytes == copies * 24_000_000 + 3000
    for replicas in (2, 4):
        shared = replace(plan((0, 3, "1024MB", False), replicas=replicas), optimizer=kind)
        assert evaluate(shared, PROFILE, SPEC).stages[0].state_bytes == (copies + 2) * 24_000_000 + 3000


def test_a_divided_optimiser_is_kept_once_by_all_replicas_together() -> None:
    adam = replace(plan((0, 3, "1024MB", False), replicas=4), optimizer=OptimizerKind.ADAM)
    whole, divided = (evaluate(replace(adam, shard_optimizer=s), PROFILE, SPEC).stages[0] for s in (False, True))
    assert whole.state_bytes - divided.state_bytes == 2 * 24_000_000 * 3 // 4
    assert whole.sync_s == divided.sync_s
    alone = replace(adam, replicas=1, shard_optimizer=True)
    assert evaluate(alone, PROFILE, SPEC).stages[0].state_bytes == 4 * 24_000_000 + 3000


def test_half_precision_halves_the_bytes_and_not_the_latency() -> None:
    half = replace(plan((0, 1, "1024MB", False), (1, 3, "1024MB", False)), wire=Wire.BF16)
    assert evaluate(half, PROFILE, SPEC).stages[0].forward_upload_s == pytest.approx(0.25 + 0.5)


def test_contention_slows_computation_only() -> None:
    cuts = plan((0, 1, "1024MB", False), (1, 3, "1024MB", False))
    slow = evaluate(cuts, PROFILE, replace(SPEC, contention=1.5))
    fast = evaluate(cuts, PROFILE, SPEC)
    assert slow.stages[1].forward_s == pytest.approx(1.5 * fast.stages[1].forward_s)
    assert slow.stages[1].forward_download_s == fast.stages[1].forward_download_s


def test_a_shared_link_is_divided_among_all_functions() -> None:
    cuts = plan((0, 1, "1024MB", False), (1, 3, "1024MB", False), replicas=2)
    shared = evaluate(cuts, PROFILE, replace(SPEC, shared_bytes_s=8e6))
    assert shared.stages[0].forward_upload_s == pytest.approx(5e6 / 2e6 + 0.5)
    assert shared.stages[0].sync_s == pytest.approx(2 * 8e6 / 2e6 + 4 * 0.5)


def test_shared_processors_bound_the_iteration_from_below() -> None:
    """Four functions compute for 21 s each: with a processor each on two of them, or half of one on one."""
    one = plan((0, 3, "1024MB", False), replicas=4)
    for vcpu, cores in ((1.0, 2), (3.0, 2), (0.5, 1)):
        sizes = (replace(SPEC.sizes[0], vcpu=vcpu), *SPEC.sizes[1:])
        estimate = evaluate(one, PROFILE, replace(SPEC, sizes=sizes, shared_cores=cores))
        assert estimate.iteration_s == pytest.approx(4 * 21 / 2)


@pytest.mark.parametrize("replicas", [2, 3, 4, 8, 16])
def test_synchronisation_on_equal_links(replicas: int) -> None:
    size, link, latency_s = 3e8, 7e7, 0.04

    def seconds(sync: Sync) -> float:
        return float(
            sync_time_s(
                sync,
                gradient_bytes=size,
                replicas=replicas,
                upload_bytes_s=link,
                download_bytes_s=link,
                latency_s=latency_s,
            )
        )

    assert seconds(Sync.THREE_PHASE) == pytest.approx(3 * size / link - 2 * size / (replicas * link) + 4 * latency_s)
    assert seconds(Sync.PIPELINED) == pytest.approx(2 * size / link + (2 + replicas) * latency_s)


def test_synchronisation_on_unequal_links() -> None:
    # four splits of 30 bytes; up 10 bytes/s, down 30 bytes/s
    times = {"gradient_bytes": 120.0, "replicas": 4, "upload_bytes_s": 10.0, "download_bytes_s": 30.0, "latency_s": 0.0}
    assert float(sync_time_s(Sync.THREE_PHASE, **times)) == pytest.approx(3 * 3 + 3 * 1 + 3 + 3 * 1)  # type: ignore[arg-type]
    assert float(sync_time_s(Sync.PIPELINED, **times)) == pytest.approx(3 + 2 * 3 + 1 + 3 + 3 * 1)  # type: ignore[arg-type]


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(PlanError, match="covers 2 layers, the profile has 3"):
        evaluate(plan((0, 2, "1024MB", False)), PROFILE, SPEC)
    with pytest.raises(PlanError, match="has no size '4096MB'"):
        evaluate(plan((0, 3, "4096MB", False)), PROFILE, SPEC)
    with pytest.raises(PlanError, match="was not measured on '3072MB'"):
        evaluate(plan((0, 3, "3072MB", False)), PROFILE, platform(3))
    with pytest.raises(PlanError, match="measured with 2"):
        evaluate(replace(plan((0, 3, "1024MB", False)), micro_batch=4), PROFILE, SPEC)


def test_a_stage_too_large_for_its_function() -> None:
    tight = plan((0, 3, "1024MB", False))
    large = replace(PROFILE, base_memory_bytes=2000 * MB)
    check_memory(tight, evaluate(tight, PROFILE, SPEC))
    with pytest.raises(PlanError, match="stage 0 needs 2084 MB, its function has 1024"):
        check_memory(tight, evaluate(tight, large, SPEC))


CHAIN = replace(
    PROFILE,
    tensors=tuple(
        TensorProfile(name=f"t{i}", producer=i, consumers=(i + 1,), forward_bytes=5_000_000, backward_bytes=10_000_000)
        for i in range(2)
    ),
)


def test_a_stage_holds_as_many_micro_batches_as_its_schedule_says() -> None:
    cuts = plan((0, 1, "1024MB", False), (1, 2, "1024MB", True), (2, 3, "1024MB", False), batch=16)
    held = {
        ScheduleKind.GPIPE: (8, 8, 8),
        ScheduleKind.ONE_F_ONE_B: (3, 2, 1),
        ScheduleKind.EAGER_ONE_F_ONE_B: (5, 3, 1),
    }
    assert set(held) == set(ScheduleKind)
    for schedule, (first, second, third) in held.items():
        stages = evaluate(replace(cuts, schedule=schedule), CHAIN, SPEC).stages
        assert stages[0].activation_bytes == first * 3_000_000
        assert stages[1].activation_bytes == second * (5_000_000 + 700) + 3_000_000  # inputs, and one recomputed
        assert stages[2].activation_bytes == third * (3_000_000 + 5_000_000)
        assert [s.base_bytes + s.state_bytes for s in stages] == [100 + 2 * 8_000_000 + 1000] * 3


def test_in_turn_a_slow_stage_sets_the_pace_with_both_passes() -> None:
    # compute 1 + 2, 2 + 4, 4 + 8; each transfer of 5 and of 10 MB takes 1 and 1.5 s
    cuts = plan((0, 1, "1024MB", False), (1, 2, "1024MB", False), (2, 3, "1024MB", False), batch=16)
    there_and_back_s = (1 + 1) + (1 + 2 + 1) + (1 + 4) + (8 + 1.5) + (1.5 + 4 + 1.5) + (1.5 + 2)
    for schedule in (ScheduleKind.ONE_F_ONE_B, ScheduleKind.EAGER_ONE_F_ONE_B):
        estimate = evaluate(replace(cuts, schedule=schedule), CHAIN, SPEC)
        assert estimate.iteration_s == pytest.approx(there_and_back_s + 7 * 12)


def test_in_turn_slow_links_set_the_pace_of_a_stage_that_holds_few() -> None:
    slow = replace(SPEC, latency_s=10.0)
    cuts = plan((0, 2, "1024MB", False), (2, 3, "1024MB", False), batch=16)
    # no link is busy for longer than 11 s a micro-batch, no stage computes for longer than 12 s
    there_and_back_s = 3 + 10.5 + 10.5 + 4 + 8 + 11 + 11 + 6
    estimate = evaluate(replace(cuts, schedule=ScheduleKind.ONE_F_ONE_B), CHAIN, slow)
    assert estimate.iteration_s == pytest.approx(there_and_back_s + 7 * there_and_back_s / 2)
    estimate = evaluate(replace(cuts, schedule=ScheduleKind.EAGER_ONE_F_ONE_B), CHAIN, slow)
    assert estimate.iteration_s == pytest.approx(there_and_back_s + 7 * there_and_back_s / 3)
    few = replace(cuts, schedule=ScheduleKind.ONE_F_ONE_B, global_batch=4)
    # the first stage may hold both micro-batches: it waits for neither's backward
    assert evaluate(few, CHAIN, slow).iteration_s == pytest.approx(there_and_back_s + 12)


def test_accumulating_gradients_takes_as_long_as_holding_everything() -> None:
    alone = plan((0, 3, "1024MB", False))
    plain = evaluate(alone, CHAIN, SPEC)
    accumulating = evaluate(replace(alone, schedule=ScheduleKind.ONE_F_ONE_B), CHAIN, SPEC)
    assert accumulating.iteration_s == pytest.approx(plain.iteration_s)
    assert accumulating.cost_usd == pytest.approx(plain.cost_usd)
    assert plain.peak_memory_bytes - accumulating.peak_memory_bytes == 1.125 * 3 * 9_000_000
