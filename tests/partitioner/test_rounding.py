"""What rounding sums costs the processor: the closed forms beside the simulator, and the search beside every plan."""

from dataclasses import replace

import pytest

from funcpipe.analysis.predict import mean_step_s
from funcpipe.core import CodecCost, Plan, PlatformSpec, Recompute, ScheduleKind, Stage, Streams, Sync, SyncWay, Wire
from funcpipe.core.stores import GB
from funcpipe.errors import Infeasible, InvalidValue
from funcpipe.partitioner.cost.evaluate import evaluate
from funcpipe.partitioner.problem.problem import Problem
from funcpipe.partitioner.search.exact import exact
from funcpipe.partitioner.search.exhaustive import exhaustive
from funcpipe.platforms.catalog import load_spec, spec_names
from tests.analysis.test_predict import SPEC, reference, summing
from tests.partitioner.instances import draw_problem
from tests.partitioner.test_local_steps import problem_of
from tests.partitioner.test_mip import by_chain_form, check, policy

CODECS = {"int8": CodecCost(encode_s_gb=0.8, decode_s_gb=0.3), "bf16": CodecCost(encode_s_gb=0.3, decode_s_gb=0.4)}
PLAIN, ROUNDED = replace(SPEC, codecs={}), replace(SPEC, codecs=CODECS)
SLOW = {
    name: CodecCost(encode_s_gb=20 * cost.encode_s_gb, decode_s_gb=20 * cost.decode_s_gb)
    for name, cost in CODECS.items()
}


def in_functions(plan: Plan, name: str) -> Plan:
    """`plan` of one stage in functions of a size."""
    return replace(plan, stages=(replace(plan.stages[0], size=name, memory_mb=SPEC.size(name).memory_mb),))


@pytest.mark.parametrize("wire", [Wire.BF16, Wire.INT8])
@pytest.mark.parametrize("replicas", [2, 4, 16])
def test_rounding_takes_as_long_as_is_played(replicas: int, wire: Wire) -> None:
    """64 MB, in functions with 0.58 processors and with 5.8; where the optimiser is divided, no sum is rounded."""
    ways = [
        *map(SyncWay, (Sync.THREE_PHASE, Sync.PIPELINED, Sync.ALL_REDUCE)),
        SyncWay(Sync.HIERARCHICAL, Streams(1, 1, 1)),
        SyncWay(Sync.TREE, Streams(1, 3, 1)),
        SyncWay(Sync.EXCHANGE, Streams(7, 1, 1)),
    ]
    ways += [SyncWay(Sync.STREAMED, cut) for cut in (Streams(1, 1, 1), Streams(2, 1, 2), Streams(4, 3, 2))]
    for way in ways if replicas < 16 else ways[:5]:
        given, profile = summing(64_000_000, replicas, way)
        for size, sharded in (
            ("1024MB", False),
            ("10240MB", False),
            ("2048MB", way.sync in (Sync.PIPELINED, Sync.HIERARCHICAL)),
        ):
            plan = in_functions(replace(given, wire_sync=wire, shard_optimizer=sharded), size)
            form_s, played_s = evaluate(plan, profile, ROUNDED).iteration_s, mean_step_s(plan, profile, ROUNDED)
            assert form_s == pytest.approx(played_s, rel=0.005), (way, size)
            assert form_s > evaluate(plan, profile, PLAIN).iteration_s


def test_rounding_takes_what_it_takes_by_hand() -> None:
    """Of two replicas in three phases, each rounds a half, and its own half and a sum, and reads three halves of what
    travels; a function with half a processor takes twice as long.
    """
    given, profile = summing(GB, 2, SyncWay(Sync.THREE_PHASE))
    spec = replace(ROUNDED, sizes=tuple(replace(size, vcpu=0.5) for size in SPEC.sizes))
    plan = in_functions(replace(given, wire_sync=Wire.INT8), "1024MB")
    more_s = evaluate(plan, profile, spec).iteration_s - evaluate(plan, profile, replace(spec, codecs={})).iteration_s
    assert more_s == pytest.approx(2 * (3 * 0.8 / 2 + 4 * 0.3 / 2))
    assert evaluate(replace(plan, wire_sync=Wire.FP32), profile, spec) == evaluate(
        replace(plan, wire_sync=Wire.FP32), profile, PLAIN
    )


@pytest.mark.parametrize("steps", [1, 4, 32])
@pytest.mark.parametrize("sync", [Sync.PIPELINED, Sync.EXCHANGE, Sync.STREAMED])
@pytest.mark.parametrize("size", ["1024MB", "6144MB"])
def test_rounding_beside_a_backward_takes_processors_from_it(size: str, sync: Sync, steps: int) -> None:
    profile = reference(layers=4, parameter_bytes=60 * 10**6)
    plan = Plan(
        global_batch=32,
        micro_batch=2,
        replicas=4,
        schedule=ScheduleKind.GPIPE,
        sync=sync,
        wire_sync=Wire.INT8,
        wire=Wire.FP32,
        sync_every=steps,
        stages=tuple(
            Stage(first=first, stop=first + 2, size=size, memory_mb=SPEC.size(size).memory_mb) for first in (0, 2)
        ),
    )
    form_s = [evaluate(plan, profile, spec).iteration_s for spec in (PLAIN, ROUNDED)]
    played_s = [mean_step_s(plan, profile, spec) for spec in (PLAIN, ROUNDED)]
    assert form_s[1] == pytest.approx(played_s[1], rel=0.05)
    assert form_s[1] - form_s[0] == pytest.approx(played_s[1] - played_s[0], rel=0.2)
    assert form_s[1] > form_s[0]


def rounded(problem: Problem, wire: Wire) -> Problem:
    """`problem` with sums in `wire`, whose rounding counts."""
    training = replace(problem.training, wire_sync=wire, wire=wire, wire_back=None)
    return replace(problem, spec=replace(problem.spec, codecs=SLOW), training=training)


@pytest.mark.parametrize("seed", [1, 3, 6, 10])
def test_exact_equals_exhaustive_where_rounding_counts(seed: int) -> None:
    compare_with_enumeration(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 200))
def test_exact_equals_exhaustive_on_a_hundred_where_rounding_counts(seed: int) -> None:
    compare_with_enumeration(seed)


def compare_with_enumeration(seed: int) -> None:
    problem = rounded(draw_problem(seed), (Wire.INT8, Wire.BF16)[seed % 2])
    try:
        expected = exhaustive(problem)
    except Infeasible:
        with pytest.raises(Infeasible):
            exact(problem)
        return
    found = exact(problem)
    assert found.solver is not None
    assert expected.solver is not None
    assert found.solver.objective == pytest.approx(expected.solver.objective, rel=1e-8)
    assert found.estimate == evaluate(found, problem.profile, problem.spec)


def test_solvers_count_rounding_as_the_search_does() -> None:
    changes = {"schedule": ScheduleKind.GPIPE, "replicas": (1, 2), "recompute": Recompute.NEVER}
    problem = rounded(problem_of(2, Sync.THREE_PHASE, 1, **changes), Wire.INT8)
    check(problem, policy("highs"))
    check(problem, lambda problem: by_chain_form(problem, "GUROBI"))


def test_shipped_specifications_say_what_rounding_costs_and_when_it_was_measured() -> None:
    for name in spec_names():
        spec: PlatformSpec = load_spec(name)
        assert spec.codecs.keys() == {"bf16", "int8"}
        assert "codec_speed" in spec.sources["codecs"]
        assert "2026-11" in spec.sources["codecs"]
        assert 0 < spec.codecs["int8"].decode_s_gb < spec.codecs["int8"].encode_s_gb < 2


def test_codecs_are_those_of_sums() -> None:
    with pytest.raises(InvalidValue, match="codecs"):
        replace(SPEC, codecs={"fp16": CodecCost(encode_s_gb=1.0, decode_s_gb=1.0)})
    with pytest.raises(InvalidValue, match="encode_s_gb"):
        CodecCost(encode_s_gb=-1.0, decode_s_gb=1.0)
