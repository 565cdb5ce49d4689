"""Merging layers keeps what a plan costs, and the cuts that are cheap."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.core import TrainingSpec
from funcpipe.errors import InvalidValue
from funcpipe.partitioner.cost.evaluate import evaluate
from funcpipe.partitioner.optimize import optimize
from funcpipe.partitioner.problem.cuts import crossing_bytes, merge_layers, starts_of
from tests.examples import at_most
from tests.partitioner.instances import chain, platform


@at_most(30)
@given(layers=st.integers(1, 20), limit=st.integers(1, 12), skips=st.integers(0, 5), seed=st.integers(0, 1000))
def test_merging_keeps_sums_names_and_crossings(layers: int, limit: int, skips: int, seed: int) -> None:
    profile = chain(layers, 2, seed, skips=skips)
    small = merge_layers(profile, limit)
    starts = starts_of(small, profile)
    assert len(small.layers) == min(layers, limit)
    assert [name for layer in small.layers for name in layer.graph_layers] == [layer.name for layer in profile.layers]
    assert small.parameter_bytes(0, len(small.layers)) == profile.parameter_bytes(0, layers)
    for first, stop in itertools.combinations(range(len(small.layers) + 1), 2):
        original = starts[first], starts[stop]
        assert small.summed_bytes(first, stop) == profile.summed_bytes(*original)
    for field in ("activation_bytes", "constant_bytes", "input_bytes"):
        assert sum(getattr(x, field) for x in small.layers) == sum(getattr(x, field) for x in profile.layers)
    seconds = [sum(layer.backward_s[1] for layer in p.layers) for p in (small, profile)]
    assert seconds[0] == pytest.approx(seconds[1])
    assert crossing_bytes(small).tolist() == crossing_bytes(profile)[list(starts)].tolist()


def test_a_plan_of_merged_layers_costs_the_same_in_the_original() -> None:
    profile, spec, training = chain(12, 2, 5, skips=3), platform(2), TrainingSpec(global_batch=16, time_value=50.0)
    small = merge_layers(profile, 5)
    assert optimize(small, spec, training).estimate is not None
    plan = optimize(profile, spec, training, layer_limit=5)
    direct = optimize(small, spec, training)
    assert plan.estimate
    assert direct.estimate
    assert plan.estimate.cost_usd == pytest.approx(evaluate(plan, profile, spec).cost_usd)
    assert plan.estimate.cost_usd == pytest.approx(direct.estimate.cost_usd)
    assert [stage.layers for stage in plan.stages] == [stage.layers for stage in direct.stages]
    for stage in plan.stages:
        assert stage.layers == tuple(layer.name for layer in profile.layers[stage.first : stage.stop])


def test_the_cheapest_cut_remains() -> None:
    for seed in range(20):
        profile = chain(8, 1, seed)
        crossing = crossing_bytes(profile)
        two = starts_of(merge_layers(profile, 7), profile)
        (gone,) = set(range(8)) - set(two)
        if 1 < gone < 7:  # not at an end, where a light layer has one neighbour only
            assert crossing[gone] >= min(crossing[gone - 1], crossing[gone + 1])


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(InvalidValue, match="limit must be at least 1, got 0"):
        merge_layers(chain(3), 0)
