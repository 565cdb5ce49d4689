"""Explanations, what-if questions and the reasons why there is no plan."""

from dataclasses import replace
from functools import partial

import pytest

from funcpipe.core import OptimizerKind, Pins, Recompute, ScheduleKind, TrainingSpec
from funcpipe.errors import Infeasible, InvalidValue, PlanError
from funcpipe.partitioner.alternatives import Changes, parse_changes, what_if
from funcpipe.partitioner.cost.evaluate import evaluate
from funcpipe.partitioner.explain import explain
from funcpipe.partitioner.explain_text import render
from funcpipe.partitioner.optimize import optimize
from tests.partitioner.instances import MB, chain, platform

TRAINING = TrainingSpec(global_batch=16, time_value=60.0, optimizer=OptimizerKind.ADAM)


def test_an_explanation_adds_up() -> None:
    profile, spec = chain(6, 3, 2), platform()
    plan = optimize(profile, spec, TRAINING)
    told = explain(plan, profile, spec, TRAINING)
    assert plan.estimate
    assert plan.solver
    assert told.objective == pytest.approx(plan.solver.objective)
    for stage, estimate in zip(told.stages, plan.estimate.stages, strict=True):
        assert stage.needs_bytes == estimate.memory_bytes
    assert told.second
    assert told.second.worse_by >= -1e-12
    for stage in told.stages:
        if stage.smaller and stage.smaller.change:
            assert stage.smaller.change.worse_by >= -1e-12  # or the plan would not be the best


def test_an_explanation_reads_well() -> None:
    profile, spec = chain(6, 3, 2), platform()
    plan = optimize(profile, spec, TRAINING)
    text = render(explain(plan, profile, spec, TRAINING))
    assert plan.estimate
    assert f"busiest: {plan.estimate.bottleneck}" in text
    assert "second-best plan: " in text
    assert "limits that bind: " in text
    assert "starting and handing over adds" in text
    assert f"stage {len(plan.stages) - 1} on " in text
    assert max(map(len, text.splitlines())) < 220


def test_limits_that_bind_are_named() -> None:
    profile, spec = chain(6, 3, 2), platform()
    free = optimize(profile, spec, TRAINING).estimate
    assert free
    hasty = replace(TRAINING, time_value=0.0, deadline_s=free.iteration_s * 1.001)
    told = explain(optimize(profile, spec, hasty), profile, spec, hasty)
    assert any(limit.startswith("time: ") for limit in told.binding)
    small = Pins(max_functions=2)
    told = explain(optimize(profile, spec, TRAINING, pins=small), profile, spec, TRAINING, pins=small)
    assert any(limit.startswith("functions at once: ") for limit in told.binding)


def test_a_plan_of_another_model_is_not_explained() -> None:
    plan = optimize(chain(6, 3, 2), platform(), TRAINING)
    with pytest.raises(PlanError, match="the plan covers 6 layers, the profile has 5"):
        explain(plan, chain(5, 3, 2), platform(), TRAINING)


def test_what_if_prices_the_plan_there_is_and_the_best_there_would_be() -> None:
    profile, spec = chain(6, 3, 2), platform()
    changes = Changes(bandwidth=3.0, price=2.0, latency_s=0.0)
    other = changes.apply(spec)
    assert other.sizes[0].upload_bytes_s == 3 * spec.sizes[0].upload_bytes_s
    assert other.sizes[0].price_usd_s == 2 * spec.sizes[0].price_usd_s
    assert other.latency_s == 0.0
    answer = what_if(profile, spec, TRAINING, changes)
    now, best = optimize(profile, spec, TRAINING), optimize(profile, other, TRAINING)
    assert answer.now is not None
    assert (answer.now.stages, answer.now.estimate) == (now.stages, now.estimate)
    assert answer.kept == evaluate(now, profile, other)
    assert (answer.best.stages, answer.best.estimate) == (best.stages, best.estimate)


@pytest.mark.parametrize(
    ("change", "dearer", "slower"),
    [
        ("bandwidth=0.5x", True, True),
        ("price=2x", True, False),
        ("request_price=100x", True, False),
        ("latency_s=0.5", True, True),
        ("contention=1.5", True, True),
        ("shared_bytes_s=2e7", True, True),
    ],
)
def test_a_plan_that_is_kept_pays_for_each_change(change: str, dearer: bool, slower: bool) -> None:
    profile, spec = chain(6, 3, 2), platform()
    answer = what_if(
        profile,
        spec,
        TRAINING,
        parse_changes([change]),
        find=partial(optimize, pins=Pins(cuts=("layer2",), replicas=(2,))),
    )
    assert answer.now is not None
    assert answer.now.estimate is not None
    assert answer.kept is not None
    assert (answer.kept.cost_usd > answer.now.estimate.cost_usd) == dearer
    assert (answer.kept.iteration_s > answer.now.estimate.iteration_s) == slower
    objective = answer.kept.cost_usd + TRAINING.time_value / 3600 * answer.kept.iteration_s
    assert answer.best.solver is not None
    assert answer.best.solver.objective <= objective * (1 + 1e-9)


def test_what_if_says_why_a_plan_cannot_be_kept() -> None:
    profile, spec = chain(6, 3, 2), platform()
    answer = what_if(profile, spec, replace(TRAINING, time_value=300.0), parse_changes(["sizes=1024MB,2048MB"]))
    assert answer.kept is None
    assert "has no size '3072MB'" in (answer.obstacle or "")
    assert {stage.size for stage in answer.best.stages} <= {"1024MB", "2048MB"}


def test_what_if_the_model_were_another_one() -> None:
    profile, spec = chain(6, 3, 2), platform()
    slower = replace(
        profile,
        layers=tuple(replace(layer, forward_s=tuple(2 * s for s in layer.forward_s)) for layer in profile.layers),
    )
    answer = what_if(profile, spec, TRAINING, Changes(), other_profile=slower)
    assert answer.now is not None
    assert answer.kept == evaluate(answer.now, slower, spec)
    shorter = what_if(profile, spec, TRAINING, Changes(), other_profile=chain(5, 3, 2))
    assert shorter.kept is None
    assert shorter.obstacle == "the plan covers 6 layers, the profile has 5"
    assert shorter.best.stages[-1].stop == 5


def test_what_if_of_a_deadline_that_cannot_be_met_as_things_are() -> None:
    profile, spec = chain(6, 3, 2), platform()
    fastest = optimize(profile, spec, replace(TRAINING, budget_usd=1e6))
    assert fastest.estimate is not None
    training = TrainingSpec(global_batch=TRAINING.global_batch, deadline_s=0.9 * fastest.estimate.iteration_s)
    answer = what_if(profile, spec, training, Changes(bandwidth=100.0, latency_s=0.0))
    assert answer.now is None
    assert answer.kept is None
    assert "no plan meets the deadline" in (answer.obstacle or "")
    assert answer.best.estimate is not None
    assert answer.best.estimate.iteration_s <= training.deadline_s  # type: ignore[operator]


def test_changes_are_parsed() -> None:
    text = ["bandwidth=2x", "price=0.5", "latency_s=0.01", "sizes=1024MB", "contention=1.5", "shared_bytes_s=1e9"]
    expected = Changes(bandwidth=2.0, price=0.5, latency_s=0.01, sizes=("1024MB",), contention=1.5, shared_bytes_s=1e9)
    assert parse_changes(text) == expected
    assert parse_changes([]).apply(platform()) == replace(platform(), name="test, changed")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speed=2x", "what-if must be NAME=VALUE with one of bandwidth, price"),
        ("price=cheap", "price must be a number, got 'cheap'"),
        ("bandwidth=0x", "bandwidth must be a factor above 0, got 0.0"),
        ("price=nan", "price must be a factor above 0, got nan"),
    ],
)
def test_changes_that_make_no_sense_are_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        parse_changes([text])


def test_what_if_of_a_size_that_there_is_not() -> None:
    with pytest.raises(InvalidValue, match="size must be one of 1024MB"):
        Changes(sizes=("5GB",)).apply(platform())


def test_too_little_memory_names_the_layer_and_what_helps() -> None:
    training = replace(TRAINING, recompute=Recompute.NEVER, replicas=(1,), schedule=ScheduleKind.GPIPE)
    profile = chain(4, 2, 3)
    hungry = replace(profile.layers[2], parameter_bytes=280 * MB, activation_bytes=400 * MB, constant_bytes=0)
    hungry = replace(hungry, workspace_bytes=0)
    tensors = tuple(replace(tensor, saved_by=()) for tensor in profile.tensors)
    profile = replace(profile, layers=(*profile.layers[:2], hungry, profile.layers[3]), tensors=tensors)
    with pytest.raises(Infeasible) as caught:
        optimize(profile, platform(2), training)
    message = str(caught.value)
    # base 200 + 4 copies of 280 + 9/8 of 4 micro-batches of 400 and of the 12 that it receives
    assert "layer 'layer2' needs at least 3173 MB in a stage of its own with 1 replicas" in message
    assert "the largest function has 2048 MB" in message
    assert "let stages recompute: " in message
    # two micro-batches in flight for a stage with one behind it
    assert "admit all schedules: 2247 MB, not yet enough" in message
    assert "which fits" in message
    assert "a platform with functions of 3173 MB" in message


def test_deadline_and_budget_say_what_could_be_met() -> None:
    profile, spec = chain(4, 2, 3), platform(2)
    with pytest.raises(Infeasible, match=r"no plan meets the deadline of 0\.5 s: the fastest takes [\d.]+ s"):
        optimize(profile, spec, replace(TRAINING, deadline_s=0.5))
    with pytest.raises(Infeasible, match=r"within the budget of 1e-06 \$ .* the cheapest costs [\d.]+ \$"):
        optimize(profile, spec, replace(TRAINING, budget_usd=1e-6))
    with pytest.raises(Infeasible, match=r"no iteration fits into the life of a function, 0\.5 s after its cold start"):
        optimize(profile, replace(spec, lifetime_s=3.0), TRAINING)


def test_pins_in_the_way_are_named() -> None:
    profile, spec = chain(4, 2, 3), platform(2)
    pins = Pins(together=(("layer0", "layer3"),), sizes={"layer0": "1024MB", "layer1": "2048MB"})
    with pytest.raises(Infeasible, match="no plan follows all pins; without together there are plans"):
        optimize(profile, spec, TRAINING, pins=pins)
    with pytest.raises(Infeasible, match="no number of replicas is left: the training admits 1, the pins 2"):
        optimize(profile, spec, replace(TRAINING, replicas=(1,)), pins=Pins(replicas=(2,)))


def test_too_few_functions_are_named() -> None:
    profile = chain(4, 1, 3)
    large = replace(profile, layers=tuple(replace(layer, parameter_bytes=200 * MB) for layer in profile.layers))
    training = TrainingSpec(global_batch=16, recompute=Recompute.NEVER)
    with pytest.raises(Infeasible, match="no plan fits into 1 functions at once, the most that test or the pins allow"):
        optimize(large, platform(1, max_functions=1), training)
