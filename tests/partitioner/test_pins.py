"""What is pinned holds, and the rest is still chosen best."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.core import Pins, Plan, TrainingSpec, from_text, to_text
from funcpipe.errors import FormatError, Infeasible, InvalidValue
from funcpipe.partitioner.explain import explain
from funcpipe.partitioner.explain_text import render
from funcpipe.partitioner.optimize import optimize
from tests.examples import in_long_run
from tests.partitioner.instances import chain, platform
from tests.partitioner.oracles import compare, enumerated, optima
from tests.partitioner.problems import pinned

TRAINING = TrainingSpec(global_batch=16, time_value=60.0)


def starts(plan: Plan) -> set[str]:
    return {stage.layers[0] for stage in plan.stages}


def size_of(plan: Plan, layer: str) -> str:
    return next(stage.size for stage in plan.stages if layer in stage.layers)


def test_a_stage_begins_at_a_pinned_cut() -> None:
    for layer in ("layer1", "layer3"):
        plan = optimize(chain(5, 2, 4), platform(2), TRAINING, pins=Pins(cuts=(layer,)))
        assert layer in starts(plan)


def test_layers_stay_together() -> None:
    plan = optimize(chain(5, 2, 4), platform(2), TRAINING, pins=Pins(together=(("layer1", "layer3"),)))
    assert not starts(plan) & {"layer2", "layer3"}


def test_sizes_replicas_and_functions_are_pinned() -> None:
    profile, spec = chain(5, 3, 4), platform()
    plan = optimize(profile, spec, TRAINING, pins=Pins(sizes={"layer2": "3072MB"}))
    assert size_of(plan, "layer2") == "3072MB"
    assert {stage.memory_mb for stage in optimize(profile, spec, TRAINING, pins=Pins(memory_mb=2048)).stages} == {2048}
    capped = optimize(profile, spec, TRAINING, pins=Pins(max_memory_mb=2048))
    assert max(stage.memory_mb for stage in capped.stages) <= 2048
    assert optimize(profile, spec, TRAINING, pins=Pins(replicas=(2,))).replicas == 2
    assert optimize(profile, spec, TRAINING, pins=Pins(max_functions=2)).workers <= 2


@pytest.mark.parametrize("seed", range(20))
def test_pinned_optima_equal_exhaustive(seed: int) -> None:
    compare(pinned(seed), optima(f"pinned {seed}"))


@pytest.mark.long
@given(seed=st.integers(20, 10**6))
def test_any_pinned_optimum_equals_exhaustive(seed: int) -> None:
    compare(pinned(seed), enumerated(pinned(seed)))


@pytest.mark.parametrize("seed", [*range(10), *in_long_run(range(10, 20))])
def test_no_plan_that_follows_the_pins_is_better_than_the_one_that_was_found_as_its_file_says(seed: int) -> None:
    """What the plan was chosen from, and for, is in it: nothing else is needed to judge it."""
    asked = pinned(seed)
    try:
        found = optimize(asked.profile, asked.spec, asked.training, pins=asked.pins)
    except Infeasible:
        return
    plan = from_text(Plan, to_text(found), source="plan.json")
    assert plan.request is not None
    assert plan.made_for is not None
    assert (plan.request, plan.made_for) == (found.request, asked.training)
    told = explain(plan, plan.request.profile, plan.request.spec, plan.made_for, pins=plan.request.pins)
    assert told.second is None or told.second.worse_by >= -1e-12
    assert "a better one" not in render(told)


def test_functions_are_not_given_what_their_plan_was_chosen_from() -> None:
    from tests.client.threads import job

    plan = optimize(chain(5, 2, 4), platform(2), TRAINING)
    assert plan.request is not None
    assert replace(job(), plan=plan).plan == replace(plan, request=None)


def test_a_pinned_cut_survives_merging() -> None:
    profile = chain(12, 2, 4)
    for layer in ("layer1", "layer6", "layer11"):
        assert layer in starts(optimize(profile, platform(2), TRAINING, pins=Pins(cuts=(layer,)), layer_limit=3))


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        (Pins(cuts=("nowhere",)), "cuts must name a layer of random, got 'nowhere'"),
        (Pins(sizes={"layer1": "9MB"}), "sizes.layer1 must be one of 1024MB, 2048MB, got '9MB'"),
        (Pins(together=(("layer1", "layer3"),), cuts=("layer2",)), "cuts must not lie inside a group of layers"),
        (Pins(together=((),)), "together must name at least one layer in each group"),
        (Pins(max_memory_mb=512), "max_memory_mb leaves no size of test, which has 1024, 2048 MB, got 512"),
    ],
)
def test_pins_that_make_no_sense_are_refused(pins: Pins, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        optimize(chain(5, 2), platform(2), TRAINING, pins=pins)


@pytest.mark.parametrize("change", [{"memory_mb": 0}, {"max_functions": 0}, {"replicas": (0,)}])
def test_pins_check_themselves(change: Mapping[str, int]) -> None:
    with pytest.raises(InvalidValue, match="must be at least 1, got 0"):
        replace(Pins(), **change)  # type: ignore[arg-type]


def test_pins_are_read_from_json() -> None:
    pins = Pins(cuts=("layer1",), together=(("layer2", "layer3"),), sizes={"layer0": "1024MB"}, replicas=(2, 4))
    assert from_text(Pins, to_text(pins), source="pins.json") == pins
    with pytest.raises(FormatError, match=r"pins.json: field 'memory_mb' must be at least 1, got 0"):
        from_text(Pins, '{"format": "funcpipe.pins/1", "memory_mb": 0}', source="pins.json")
