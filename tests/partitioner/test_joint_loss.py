"""Plans for a loss that is computed once for the whole global batch: what the exchange takes, and which is best."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.analysis.predict import predict
from funcpipe.core import Plan, Recompute, Resource, ScheduleKind, Stage, Sync, TrainingSpec, Wire
from funcpipe.errors import Infeasible, InvalidValue, PlanError
from funcpipe.partitioner.cost.evaluate import check_objects, evaluate
from funcpipe.partitioner.optimize import optimize
from funcpipe.partitioner.problem.problem import Problem
from funcpipe.scheduler.tasks import Kind, Task
from tests.partitioner.instances import MB, chain, platform, store
from tests.partitioner.oracles import JOINT, compare, optima
from tests.partitioner.problems import DATA, SPEC, jointly

PROFILE = replace(chain(4, 3, 5), output_bytes=2 * MB)


def plan(*, replicas: int, joint_loss: bool = True, micro_batches: int = 8, cuts: tuple[int, ...] = (0, 2, 4)) -> Plan:
    return Plan(
        global_batch=4 * micro_batches,
        micro_batch=4,
        replicas=replicas,
        schedule=ScheduleKind.GPIPE,
        sync=Sync.PIPELINED,
        wire=Wire.FP32,
        joint_loss=joint_loss,
        stages=tuple(
            Stage(first=first, stop=stop, size="2048MB", memory_mb=2048) for first, stop in itertools.pairwise(cuts)
        ),
    )


def test_the_exact_search_finds_what_pricing_every_plan_finds() -> None:
    for seed in JOINT:
        compare(jointly(seed), optima(f"joint loss {seed}"))


def test_replicas_exchange_outputs_before_the_first_backward() -> None:
    """8 micro-batches of 2 MB, links of 40 and 45 MB/s, 0.04 s of latency.

    Two replicas put 8 MB each and read 8 MB; four put 4 MB, and read 12 in three objects.
    """
    size = next(size for size in SPEC.sizes if size.name == "2048MB")
    expected = {
        1: (0.0, 0, 0, 0),
        2: (0.08 + 8 * MB / size.upload_bytes_s + 8 * MB / size.download_bytes_s, 2, 2, 16 * MB),
        4: (0.08 + 4 * MB / size.upload_bytes_s + 12 * MB / size.download_bytes_s, 4, 12, 16 * MB),
    }
    for replicas, (seconds, puts, gets, sent_bytes) in expected.items():
        joint, apart = (evaluate(plan(replicas=replicas, joint_loss=one), PROFILE, SPEC) for one in (True, False))
        assert joint.iteration_s - apart.iteration_s == pytest.approx(seconds)
        assert [stage.joint_s for stage in joint.stages] == [0.0, pytest.approx(seconds)]
        assert (joint.puts - apart.puts, joint.gets - apart.gets) == (puts, gets)
        assert joint.stores[0].sent_bytes - apart.stores[0].sent_bytes == sent_bytes
        assert joint.stores[0].received_bytes - apart.stores[0].received_bytes == (replicas - 1) * 16 * MB


def test_outputs_of_all_micro_batches_take_memory_in_the_last_stage() -> None:
    """As they came, as one batch, and its gradients, of all replicas; and a message with a replica's own."""
    for replicas, megabytes in ((1, 3 * 16), (2, 3 * 16 + 8), (4, 3 * 16 + 4)):
        joint, apart = (evaluate(plan(replicas=replicas, joint_loss=one), PROFILE, SPEC) for one in (True, False))
        more = [a.memory_bytes - b.memory_bytes for a, b in zip(joint.stages, apart.stages, strict=True)]
        assert more == [0, megabytes * MB * 9 // 8]  # an eighth is lost between them


def test_targets_count_where_loading_was_measured() -> None:
    joint = evaluate(plan(replicas=2), replace(PROFILE, data=DATA, output_bytes=MB), SPEC)
    assert joint.stages[1].joint_s == evaluate(plan(replicas=2), PROFILE, SPEC).stages[1].joint_s


@given(
    replicas=st.sampled_from([1, 2, 4]),
    each=st.integers(1, 4),
    seed=st.integers(0, 50),
    cuts=st.sets(st.integers(1, 3)),
    output_bytes=st.integers(0, 50 * MB),
)
def test_an_iteration_takes_as_long_and_as_many_requests_when_it_is_simulated(
    replicas: int, each: int, seed: int, cuts: set[int], output_bytes: int
) -> None:
    """Without parameters, whose sums partly overlap; of a chain that returns all gradients the closed form is exact."""
    made = chain(4, 3, seed)
    frozen = tuple(replace(layer, parameter_bytes=0) for layer in made.layers)
    returned = tuple(replace(tensor, backward_bytes=tensor.forward_bytes) for tensor in made.tensors)
    profile = replace(made, layers=frozen, tensors=returned, output_bytes=output_bytes)
    chosen = plan(replicas=replicas, micro_batches=replicas * each, cuts=(0, *sorted(cuts), 4))
    without_sums = replace(SPEC, latency_s=0.0)  # what sums of nothing would take
    found, estimate = predict(chosen, profile, without_sums), evaluate(chosen, profile, without_sums)
    assert found.duration_s == pytest.approx(estimate.iteration_s, rel=1e-9)
    lanes = Counter(event.lane for event in found.events)
    assert (lanes[Resource.UPLOAD], lanes[Resource.DOWNLOAD]) == (estimate.puts, estimate.gets)
    moved = sum(e.payload_bytes for e in found.events if Task.parse(e.task).kind is Kind.PUT_OUTPUTS)
    assert moved == (replicas * each * output_bytes if replicas > 1 else 0)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_latencies_of_an_exchange_pass_side_by_side(replicas: int) -> None:
    joint, apart = (predict(plan(replicas=replicas, joint_loss=one), PROFILE, SPEC) for one in (True, False))
    expected = evaluate(plan(replicas=replicas), PROFILE, SPEC).stages[1].joint_s
    assert joint.duration_s - apart.duration_s == pytest.approx(expected)


def test_a_solver_finds_the_same_plan() -> None:
    from funcpipe.partitioner.mip import highs

    for sync in (Sync.PIPELINED, Sync.ALL_REDUCE):
        training = TrainingSpec(global_batch=16, joint_loss=True, time_value=300.0, replicas=(1, 2, 4), sync=sync)
        problem = Problem(profile=PROFILE, spec=platform(3, shared_bytes_s=None), training=training)
        found, expected = highs(problem), optimize(PROFILE, problem.spec, training)
        assert found.solver
        assert expected.solver
        assert found.joint_loss
        assert found.solver.objective == pytest.approx(expected.solver.objective, rel=1e-6)


def test_what_cannot_be_planned_is_refused() -> None:
    joint = TrainingSpec(global_batch=16, joint_loss=True)
    with pytest.raises(InvalidValue, match="must be gpipe with joint_loss, as with coupled='cache'"):
        replace(joint, schedule=ScheduleKind.ONE_F_ONE_B)
    with pytest.raises(InvalidValue, match="must be gpipe with joint_loss"):
        replace(plan(replicas=1), schedule=ScheduleKind.EAGER_ONE_F_ONE_B)
    with pytest.raises(InvalidValue, match=r"must be known for a joint loss .*; profile the model again"):
        optimize(replace(PROFILE, output_bytes=None), SPEC, joint)
    paper = replace(joint, recompute=Recompute.NEVER, schedule=ScheduleKind.GPIPE, sync=Sync.PIPELINED)
    with pytest.raises(InvalidValue, match="cannot be expressed in the paper's form"):
        optimize(PROFILE, SPEC, paper, solver="paper")
    for policy in ("lambdaml-ga", "hybridps"):
        with pytest.raises(InvalidValue, match=f"does not go with the policy {policy}"):
            optimize(PROFILE, SPEC, joint, policy=policy)
    assert optimize(PROFILE, SPEC, joint, policy="lambdaml").joint_loss


def test_outputs_that_are_too_large_for_a_store_are_no_choice() -> None:
    small = replace(SPEC, stores=(store("small", largest_bytes=10 * MB),))
    training = TrainingSpec(global_batch=32, joint_loss=True, replicas=(2,), stores={"messages": "small"})  # type: ignore[arg-type]
    large = replace(PROFILE, output_bytes=4 * MB)
    assert optimize(PROFILE, small, training).replicas == 2
    with pytest.raises(Infeasible):
        optimize(large, small, training)
    chosen = replace(plan(replicas=2), stores=training.stores)
    with pytest.raises(PlanError, match="stage 1 writes an object that is too large"):
        check_objects(chosen, large, small)
