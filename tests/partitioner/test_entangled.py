"""Models whose layers feed many others are planned like any: within a bound, with the pins, or with a true refusal."""

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.core import (
    NO_PINS,
    ModelProfile,
    Optimality,
    Pins,
    Recompute,
    Stores,
    StoreSpec,
    Sync,
    TensorProfile,
    TiedParameter,
    TrainingSpec,
)
from funcpipe.errors import Infeasible
from funcpipe.partitioner.cost.evaluate import check_memory, evaluate
from funcpipe.partitioner.explain import explain
from funcpipe.partitioner.optimize import merged_problem, optimize
from funcpipe.partitioner.problem.cuts import Borders
from funcpipe.partitioner.problem.stage_graph import TooEntangled, build_stage_graph
from funcpipe.partitioner.stores import store_choices
from tests.examples import at_most
from tests.partitioner.instances import MB, chain, platform

TRAINING = TrainingSpec(global_batch=16, time_value=30.0)


def encoder_decoder(layers: int, seed: int, *, scale: float = 1.0) -> ModelProfile:
    """A profile like T5's: masks, position biases and the encoder's output are read by many layers, weights are tied.

    Most neighbours exchange several tensors. `scale` multiplies the seconds.
    """
    draw, half = random.Random(seed), layers // 2
    base = chain(layers, 2, seed)
    made = []
    for layer in base.layers:
        factor = scale * draw.lognormvariate(0, 1)
        made.append(
            replace(
                layer,
                parameter_bytes=layer.parameter_bytes // 20,
                forward_s=tuple(s * factor for s in layer.forward_s),
                backward_s=tuple(s * factor for s in layer.backward_s),
            )
        )
    ends: list[tuple[int, tuple[int, ...]]] = [(half - 1, tuple(range(half + 1, layers, 2)))]
    for first, stop in ((0, half), (half, layers)):
        ends += [(first, tuple(range(first + 1, stop, 3))), (first + 1, tuple(range(first + 3, stop, 3)))]
        ends += [(i, (i + 1, i + 2)) for i in range(first, stop - 2) if draw.random() < 0.5]
        ends += [(i, (i + 1,)) for i in range(first, stop - 1) for _ in range(draw.choice([1, 1, 2, 4]))]
    tensors = (
        TensorProfile(
            name=f"tensor{i}",
            producer=producer,
            consumers=consumers,
            forward_bytes=draw.randrange(1000, MB),
            backward_bytes=draw.choice([0, 1000, MB]),
        )
        for i, (producer, consumers) in enumerate(ends)
        if consumers
    )
    tie = TiedParameter(name="shared", layers=(0, half, layers - 1), parameter_bytes=made[0].parameter_bytes // 4)
    layers_with_tie = [replace(x, parameter_bytes=max(x.parameter_bytes, tie.parameter_bytes)) for x in made]
    return replace(base, layers=tuple(layers_with_tie), tensors=tuple(tensors), ties=(tie,))


@pytest.mark.parametrize("scale", [1e-5, 1e-2, 1.0])
def test_two_pinned_cuts_and_three_functions_leave_one_way_whatever_the_times(scale: float) -> None:
    for seed in range(3):
        profile = encoder_decoder(60, seed, scale=scale)
        pins = Pins(cuts=("layer20", "layer40"), max_functions=3)
        plan = optimize(profile, platform(2), TRAINING, pins=pins)
        assert [(stage.first, stage.stop) for stage in plan.stages] == [(0, 20), (20, 40), (40, 60)]
        assert plan.solver
        assert plan.solver.status is Optimality.OPTIMAL
        problem, _ = merged_problem(profile, platform(2), TRAINING, pins=pins, layer_limit=40)
        assert len(problem.stage_graph.first) == 3


@pytest.mark.parametrize("scale", [1e-4, 1.0])
def test_a_free_plan_is_found_among_merged_layers_and_says_so(scale: float) -> None:
    profile, spec = encoder_decoder(60, 1, scale=scale), platform(2)
    training = replace(TRAINING, sync=Sync.PIPELINED)  # so that all is proved
    problem, starts = merged_problem(profile, spec, training, pins=NO_PINS, layer_limit=40, edge_limit=3000)
    assert len(problem.stage_graph.first) <= 3000
    plan = optimize(profile, spec, training, edge_limit=3000)
    assert plan.solver
    assert plan.solver.status is Optimality.OPTIMAL
    assert plan.solver.merged_layers == len(problem.profile.layers) == len(starts) - 1 < 40


def test_a_profile_that_is_not_merged_says_nothing_of_it() -> None:
    plan = optimize(chain(6, 2, 1), platform(2), TRAINING)
    assert plan.solver
    assert plan.solver.merged_layers is None


def test_a_small_memory_makes_the_graph_small() -> None:
    """Stages that fit no function are not enumerated: here no more than two layers fit together."""
    drawn = encoder_decoder(20, 3)
    profile = replace(drawn, layers=tuple(replace(layer, constant_bytes=700 * MB) for layer in drawn.layers))
    with pytest.raises(TooEntangled):
        build_stage_graph(profile, edge_limit=2000)
    problem, _ = merged_problem(profile, platform(2), TRAINING, pins=NO_PINS, layer_limit=40, edge_limit=2000)
    assert len(problem.profile.layers) == 20
    assert len(problem.stage_graph.first) <= 2000


def test_a_store_of_small_objects_rules_out_nothing_in_another_one() -> None:
    """The first pair of stores takes no message, and all layers together fit no function: plans are in the others."""
    drawn = encoder_decoder(20, 3)
    profile = replace(drawn, layers=tuple(replace(layer, constant_bytes=700 * MB) for layer in drawn.layers))
    small = StoreSpec(
        name="small", what="for notes", latency_s=0.0, price_put_usd=0.0, price_get_usd=0.0, largest_bytes=100
    )
    large = replace(small, name="large", what="for all", latency_s=0.01, largest_bytes=None)
    spec, training = platform(2, stores=(small, large)), replace(TRAINING, stores=Stores.of("auto"))
    first = store_choices(spec, training.stores)[0]
    assert first == Stores(messages="small", sums="small")
    problem, _ = merged_problem(profile, spec, training, pins=NO_PINS, layer_limit=40, edge_limit=2000, stores=first)
    assert problem.stores == first
    alone = replace(training, stores=Stores(messages="large", sums="large"))
    expected, _ = merged_problem(
        profile, spec, alone, pins=NO_PINS, layer_limit=40, edge_limit=2000, stores=alone.stores
    )
    assert problem.fitting == expected.fitting
    plan = optimize(profile, spec, replace(training, replicas=(1,)), edge_limit=2000)
    assert plan.stores.messages == "large"


def test_every_cut_pinned_is_one_path_however_entangled() -> None:
    for seed in range(5):
        profile = chain(12, 1, seed, skips=60)
        graph = build_stage_graph(profile, Borders.of(12, admits=lambda first, stop: stop == first + 1))
        assert graph.first.tolist() == list(range(11, -1, -1))
    with pytest.raises(TooEntangled, match="more than 50 ways from layer 11 on; merge layers, or fix some cuts"):
        build_stage_graph(chain(12, 1, 1, skips=60), edge_limit=50)


def test_layers_pinned_to_different_sizes_are_not_merged() -> None:
    profile, spec = encoder_decoder(12, 3), platform(2)
    sizes = {"layer3": "1024MB", "layer5": "2048MB", "layer6": "1024MB"}
    plan = optimize(profile, spec, TRAINING, pins=Pins(sizes=sizes), layer_limit=2)
    for layer, size in sizes.items():
        assert next(stage.size for stage in plan.stages if layer in stage.layers) == size


def test_a_plan_of_merged_layers_is_explained() -> None:
    profile, spec = encoder_decoder(16, 2), platform(2)
    plan = optimize(profile, spec, TRAINING)
    assert explain(plan, profile, spec, TRAINING).second is not None


def test_too_few_functions_for_the_pins_are_told_whatever_the_graph_without_them() -> None:
    profile = encoder_decoder(16, 5)
    with pytest.raises(Infeasible, match="no plan follows all pins; without cuts or without max_functions there are"):
        optimize(profile, platform(2), TRAINING, edge_limit=1000, pins=Pins(cuts=("layer5", "layer9"), max_functions=2))


@at_most(60)
@given(seed=st.integers(0, 10**6), limit=st.sampled_from([8, 20, 60, 10**6]))
def test_any_tangle_is_planned_or_has_no_plan(seed: int, limit: int) -> None:
    """The oracle prices every plan: where it finds one, there is one, however few edges the graph may have."""
    draw = random.Random(seed)
    layers, scale = draw.choice([3, 4, 5, 6]), 10.0 ** draw.randint(-4, 2)
    drawn = chain(layers, 1, seed, skips=draw.choice([0, 4, 10]))
    timed = [
        replace(x, forward_s=(x.forward_s[0] * scale,), backward_s=(x.backward_s[0] * scale,)) for x in drawn.layers
    ]
    profile = replace(drawn, layers=tuple(timed))
    spec = platform(1, max_functions=draw.choice([1, 2, 3, 1000]), lifetime_s=None)
    names = [layer.name for layer in profile.layers]
    pins = Pins(
        cuts=tuple(draw.sample(names, draw.choice([0, 0, 1, 2]))), max_functions=draw.choice([None, None, 1, 2, 3])
    )
    training = TrainingSpec(
        global_batch=16,
        time_value=draw.choice([0, 30]),
        recompute=draw.choice(list(Recompute)),
        sync=Sync.PIPELINED,
        replicas=draw.choice([(1,), (1, 2), (2, 4)]),
    )
    try:
        best = optimize(profile, spec, training, pins=pins, policy="exhaustive")
    except Infeasible:
        with pytest.raises(Infeasible):
            optimize(profile, spec, training, pins=pins, edge_limit=limit)
        return
    plan = optimize(profile, spec, training, pins=pins, edge_limit=limit)
    assert best.solver
    assert plan.solver
    estimate = evaluate(plan, profile, spec)
    check_memory(plan, estimate)
    objective = estimate.cost_usd + training.time_value / 3600 * estimate.iteration_s
    assert objective >= best.solver.objective * (1 - 1e-9)
    assert {names.index(cut) for cut in pins.cuts} <= {stage.first for stage in plan.stages}
    assert plan.workers <= min(spec.max_functions, pins.max_functions or 1000)
    if plan.solver.merged_layers is None:
        assert objective == pytest.approx(best.solver.objective, rel=1e-8)


def test_the_loose_graph_costs_no_more_than_any_plan() -> None:
    for seed in range(10):
        profile = chain(6, 1, seed, skips=6)
        problem, _ = merged_problem(profile, platform(1), TRAINING, pins=NO_PINS, layer_limit=40)
        loose, traffic = problem.loose_graph, problem.loose_graph.traffic
        number = {edge: i for i, edge in enumerate(zip(loose.first.tolist(), loose.stop.tolist(), strict=True))}
        exact = problem.stage_graph
        for edge, ends in enumerate(zip(exact.first.tolist(), exact.stop.tolist(), strict=True)):
            for name in type(traffic).__dataclass_fields__:
                assert getattr(traffic, name)[number[ends]] <= getattr(exact.traffic, name)[edge]
        assert len(number) == sum(1 for _ in itertools.combinations(range(7), 2))
