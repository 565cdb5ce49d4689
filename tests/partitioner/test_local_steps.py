"""Plans whose replicas train alone between meetings, against every plan there is, each step of a round by itself."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from funcpipe.core import (
    MB,
    Estimate,
    ModelProfile,
    OptimizerKind,
    Plan,
    PlatformSpec,
    Recompute,
    ScheduleKind,
    Stage,
    Sync,
    TiedParameter,
    TrainingSpec,
    Wire,
    to_text,
)
from funcpipe.errors import Infeasible, InvalidValue
from funcpipe.partitioner.alternatives import Changes, what_if
from funcpipe.partitioner.cost.evaluate import evaluate
from funcpipe.partitioner.cost.stores import sync_requests
from funcpipe.partitioner.cost.sync_time import sync_time_s
from funcpipe.partitioner.explain import explain
from funcpipe.partitioner.explain_text import render
from funcpipe.partitioner.optimize import optimize
from funcpipe.partitioner.problem.problem import Problem
from funcpipe.partitioner.search.exact import exact
from funcpipe.partitioner.search.exhaustive import all_cuts, exhaustive
from funcpipe.scheduler.pipeline import in_flight
from tests.partitioner.instances import chain, draw_problem, platform
from tests.partitioner.test_mip import by_chain_form, check, policy


def step_times(plan: Plan, estimate: Estimate, profile: ModelProfile, spec: PlatformSpec) -> tuple[float, float]:
    """Seconds of a step without a meeting, and of one with it, from the lanes of stages alone."""
    stages, repeats = estimate.stages, plan.micro_batches // plan.replicas - 1
    there = [s.forward_s + s.forward_upload_s + s.forward_download_s for s in stages]
    back = [s.backward_s + s.backward_upload_s + s.backward_download_s for s in stages]
    if plan.schedule is ScheduleKind.GPIPE:
        forward_lanes = [max(s.forward_s, s.forward_upload_s, s.forward_download_s) for s in stages]
        backward_lanes = [max(s.backward_s, s.backward_upload_s, s.backward_download_s) for s in stages]
    else:
        forward_lanes, backward_lanes = [], [0.0] * len(stages)
        for i, s in enumerate(stages):
            links = s.forward_upload_s + s.backward_upload_s, s.forward_download_s + s.backward_download_s
            own = s.forward_s + s.forward_upload_s + s.backward_download_s + s.backward_s
            held = in_flight(plan.schedule, stage=i, stages=len(stages), micro_batches=repeats + 1)
            pace = (sum(there[i + 1 :]) + sum(back[i + 1 :]) + own) / held if held < repeats + 1 else 0.0
            forward_lanes.append(max(s.forward_s + s.backward_s, *links, pace))
    forward_s = sum(there) + repeats * max(forward_lanes)
    ends = [sum(back[k:]) + repeats * max(backward_lanes[k:]) for k in range(len(stages))]
    exchange = [meeting_s(plan, k, profile, spec) for k in range(len(stages))]
    met_s = max(end + seconds for end, seconds in zip(ends, exchange, strict=True))
    return forward_s + ends[0], forward_s + met_s


def meeting_s(plan: Plan, number: int, profile: ModelProfile, spec: PlatformSpec) -> float:
    """Seconds of a stage's exchange, none of which a backward hides."""
    stage, way = plan.stages[number], plan.ways[number]
    size = spec.size(stage.size)
    summed = sum(layer.parameter_bytes for layer in profile.layers[stage.first : stage.stop]) / plan.sync_fragments
    seconds = sync_time_s(
        way.sync,
        gradient_bytes=plan.wire_sync.ratio * summed,
        merged_bytes=plan.merged_wire.ratio * summed,
        replicas=plan.replicas,
        upload_bytes_s=size.upload_bytes_s,
        download_bytes_s=size.download_bytes_s,
        latency_s=spec.latency_s,
        streams=way.streams,
    )
    return float(seconds)


def price(plan: Plan, profile: ModelProfile, spec: PlatformSpec, steps: int) -> tuple[float, float, list[float]]:
    """Seconds and dollars of a mean step in rounds of so many, and megabytes of the stages' functions."""
    summing = replace(plan, sync_every=1, outer_momentum=0.0, sync_fragments=1, shard_optimizer=False)
    each = evaluate(summing, profile, spec)
    alone_s, met_s = step_times(plan, each, profile, spec)
    meetings = plan.sync_fragments
    mean_s = ((steps - meetings) * alone_s + meetings * met_s) / steps if plan.replicas > 1 else alone_s
    puts, gets = (sum(counts) for counts in zip(*(sync_requests(w, plan.replicas) for w in plan.ways), strict=True))
    requests_usd = each.request_usd - (1 - meetings / steps) * (puts * spec.price_put_usd + gets * spec.price_get_usd)
    price_usd_s = plan.replicas * sum(spec.size(stage.size).price_usd_s for stage in plan.stages)
    kept = float(1 + (plan.outer_momentum > 0)) if plan.replicas > 1 else 0.0
    if plan.is_sharded:
        kept = (kept + 1) / plan.replicas
    own = [sum(x.parameter_bytes for x in profile.layers[s.first : s.stop]) for s in plan.stages]
    memory = [(s.memory_bytes + kept * bytes_) / MB for s, bytes_ in zip(each.stages, own, strict=True)]
    return mean_s, price_usd_s * mean_s + requests_usd, memory


def plans(problem: Problem) -> Iterator[Plan]:
    """Every plan of the problem, whose way of synchronising is given, and in which no stage recomputes."""
    wanted, profile = problem.training, problem.profile
    for replicas, cuts in itertools.product(problem.degrees, all_cuts(len(profile.layers))):
        for schedule in problem.schedules(replicas):
            for sizes in itertools.product(problem.spec.sizes, repeat=len(cuts)):
                yield Plan(
                    **wanted.base_fields,
                    micro_batch=profile.micro_batch,
                    replicas=replicas,
                    schedule=schedule,
                    sync=wanted.sync or Sync.PIPELINED,
                    stages=tuple(
                        Stage(first=first, stop=stop, size=size.name, memory_mb=size.memory_mb)
                        for (first, stop), size in zip(cuts, sizes, strict=True)
                    ),
                    model=profile.model,
                    platform=problem.spec.name,
                )


def best_priced(problem: Problem, steps: int) -> float:
    """The best objective of all plans that fit, each priced step by step."""
    best = math.inf
    for plan in plans(problem):
        seconds, dollars, memory = price(plan, problem.profile, problem.spec, steps)
        if all(needs <= stage.memory_mb for needs, stage in zip(memory, plan.stages, strict=True)):
            best = min(best, dollars + problem.goal.time_value_usd_s * seconds)
    return best


def problem_of(seed: int, sync: Sync, steps: int, **changes: object) -> Problem:
    training = TrainingSpec(
        global_batch=16,
        time_value=(3.84, 300.0, 3000.0)[seed % 3],
        sync=sync,
        recompute=Recompute.NEVER,
        sync_every=steps,
        outer_momentum=0.9 * (seed % 2),
        optimizer=OptimizerKind.ADAM,
    )
    spec = platform(2, latency_s=(0.04, 0.5)[seed % 2])
    return Problem(profile=chain(3, 2, seed), spec=spec, training=replace(training, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seed", "sync", "steps", "sharded", "fragments"),
    [
        (0, Sync.PIPELINED, 4, False, 1),
        (1, Sync.STREAMED, 2, False, 2),
        (2, Sync.EXCHANGE, 32, False, 8),
        (3, Sync.THREE_PHASE, 2, False, 1),
        (5, Sync.PIPELINED, 2, True, 1),
    ],
)
def test_the_best_plan_is_that_of_all_priced_step_by_step(
    seed: int, sync: Sync, steps: int, sharded: bool, fragments: int
) -> None:
    problem = problem_of(seed, sync, steps, shard_optimizer=sharded, sync_fragments=fragments)
    found = exact(problem).solver
    assert found is not None
    assert found.objective == pytest.approx(best_priced(problem, steps), rel=1e-8)


@pytest.mark.parametrize("schedule", ScheduleKind)
@pytest.mark.parametrize(("steps", "sharded"), [(2, True), (32, False)])
def test_an_iteration_is_the_mean_of_a_round(schedule: ScheduleKind, steps: int, sharded: bool) -> None:
    changes = {"schedule": schedule, "global_batch": 32, "replicas": (2,), "shard_optimizer": sharded}
    wanted = problem_of(1, Sync.STREAMED, steps, **changes)
    for plan in plans(wanted):
        estimate = evaluate(plan, wanted.profile, wanted.spec)
        seconds, dollars, memory = price(plan, wanted.profile, wanted.spec, steps)
        assert estimate.iteration_s == pytest.approx(seconds)
        assert estimate.cost_usd == pytest.approx(dollars)
        assert [stage.memory_bytes / MB for stage in estimate.stages] == pytest.approx(memory)
        assert estimate.meeting_s == pytest.approx(step_times(plan, estimate, wanted.profile, wanted.spec)[1])


@pytest.mark.parametrize("seed", [1, 2, 3, 5, 6, 8, 10, 13])
def test_exact_equals_exhaustive_with_ways_of_their_own(seed: int) -> None:
    compare_with_enumeration(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 300))
def test_exact_equals_exhaustive_on_two_hundred(seed: int) -> None:
    compare_with_enumeration(seed)


def compare_with_enumeration(seed: int) -> None:
    """In rounds of 2 steps, or of 8 in two fragments which are late, or in one round."""
    drawn = draw_problem(seed)
    wire = Wire.FP32 if drawn.training.wire is Wire.FP16 else drawn.training.wire
    training = replace(drawn.training, sync_every=(2, 8, "end")[seed % 3], outer_momentum=0.9, wire=wire)
    if seed % 3 == 1:
        training = replace(training, sync_fragments=2, sync_delay=0 if training.shard_optimizer else 3)
    problem = replace(drawn, training=training)
    try:
        expected = exhaustive(problem).solver
    except Infeasible:
        with pytest.raises(Infeasible):
            exact(problem)
        return
    found = exact(problem).solver
    assert expected is not None
    assert found is not None
    assert found.objective == pytest.approx(expected.objective, rel=1e-8)


@pytest.mark.parametrize(("schedule", "delay"), [(ScheduleKind.GPIPE, 0), (ScheduleKind.ONE_F_ONE_B, 1)])
def test_solvers_equal_the_exact_search(schedule: ScheduleKind, delay: int) -> None:
    problem = problem_of(1, Sync.PIPELINED, 4, schedule=schedule, replicas=(1, 2), sync_delay=delay)
    check(problem, policy("highs"))


def test_the_papers_form_does_not_know_late_meetings() -> None:
    problem = problem_of(2, Sync.THREE_PHASE, 4, schedule=ScheduleKind.GPIPE, sync_delay=1)
    with pytest.raises(InvalidValue, match="sync_delay cannot be expressed in the paper's form"):
        by_chain_form(problem, "GUROBI")


def test_the_papers_form_equals_the_exact_search() -> None:
    problem = problem_of(2, Sync.THREE_PHASE, 4, schedule=ScheduleKind.GPIPE)
    check(problem, lambda problem: by_chain_form(problem, "GUROBI"))


def test_gradients_of_tied_parameters_travel_in_every_step() -> None:
    """A round of a million steps takes what stages alone take, and the exchange of ties after the last backward; when
    replicas meet, the sum of the parameters travels once more.
    """
    profile = chain(3, 2, 0)
    tie = TiedParameter(name="tied", layers=(0, 2), parameter_bytes=profile.layers[0].parameter_bytes // 2)
    wanted = problem_of(0, Sync.PIPELINED, 4, sync_every="end", replicas=(2,), schedule=ScheduleKind.GPIPE)
    for plan in plans(wanted):
        alone = evaluate(plan, profile, wanted.spec)
        shared = evaluate(plan, replace(profile, ties=(tie,)), wanted.spec)
        if len(plan.stages) == 1:
            continue
        ends = [wanted.spec.size(plan.stages[place].size) for place in (0, -1)]
        moved_s = max(
            2 * wanted.spec.latency_s + tie.parameter_bytes * (1 / size.upload_bytes_s + 1 / size.download_bytes_s)
            for size in ends
        )
        assert shared.iteration_s == pytest.approx(alone.iteration_s + moved_s, rel=1e-4)
        assert shared.puts - alone.puts == 4  # the gradient and the sum, for each replica
        always = replace(plan, sync_every=1, outer_momentum=0.0)
        each, tied = (evaluate(always, some, wanted.spec) for some in (profile, replace(profile, ties=(tie,))))
        met, tied_met = (
            evaluate(replace(plan, sync_every=2), some, wanted.spec)
            for some in (profile, replace(profile, ties=(tie,)))
        )
        more_usd = tied_met.request_usd - met.request_usd - (tied.request_usd - each.request_usd)
        assert more_usd == pytest.approx((2 * wanted.spec.price_put_usd + 2 * wanted.spec.price_get_usd) / 2)


def test_replicas_that_train_alone_keep_all_of_the_optimiser_and_what_they_meet_with() -> None:
    training = TrainingSpec(global_batch=16, optimizer=OptimizerKind.ADAM, shard_optimizer=True)
    assert training.values_each(4) == 2 / 4
    local = replace(training, sync_every=8)
    assert local.values_each(4) == 2 + 2 / 4
    assert replace(local, outer_momentum=0.9).values_each(4) == 2 + 3 / 4
    whole = replace(local, shard_optimizer=False)
    assert whole.values_each(4) == 2 + 1
    assert replace(whole, outer_momentum=0.9).values_each(4) == 2 + 2
    late = replace(whole, sync_fragments=4, sync_delay=1)
    assert late.values_each(4) == 2 + 1 + 1 / 4
    assert late.kept_errors(Sync.STREAMED, 4) == Sync.STREAMED.fed_back(4) * (1 + 1 / 4)
    assert replace(local, outer_momentum=0.9).values_each(1) == 2


def test_meetings_of_one_replica_change_nothing() -> None:
    problem = problem_of(2, Sync.PIPELINED, 8, replicas=(1,))
    always = replace(problem, training=replace(problem.training, sync_every=1, outer_momentum=0.0))
    assert exact(problem).stages == exact(always).stages
    assert exact(problem).estimate == exact(always).estimate


def test_plans_without_local_steps_say_nothing_of_them() -> None:
    text = to_text(exact(problem_of(0, Sync.PIPELINED, 1, outer_momentum=0.0, replicas=(2,))))
    assert "meeting" not in text
    assert "sync_every" not in text


AUTO = TrainingSpec(
    global_batch=16, time_value=300.0, replicas=(1, 4), sync_every="auto", sync_every_at_most=12, outer_momentum=0.9
)


def test_auto_takes_as_many_steps_as_it_may_and_says_what_fewer_would_buy() -> None:
    profile, spec = chain(3, 2, 0), platform(2)
    plan = optimize(profile, spec, AUTO)
    assert (plan.sync_every, plan.outer_momentum, plan.replicas) == (12, 0.9, 4)
    assert plan.made_for == AUTO
    assert plan.solver is not None
    assert plan.is_proved
    found = explain(plan, profile, spec, AUTO)
    assert [row.sync_every for row in found.rounds] == [1, 2, 4, 8, 12]
    assert found.rounds[0].iteration_s == optimize(profile, spec, replace(AUTO, **ALWAYS)).estimate.iteration_s  # type: ignore[union-attr]
    assert plan.estimate is not None
    assert found.rounds[-1].iteration_s == plan.estimate.iteration_s
    seconds = [row.iteration_s for row in found.rounds]
    assert seconds == sorted(seconds, reverse=True)
    assert found.rounds[-1].meeting_s == plan.estimate.meeting_s
    alone_s = evaluate(replace(plan, replicas=1), profile, spec).iteration_s
    assert found.rounds[-1].efficiency == pytest.approx(alone_s / seconds[-1] / 4)
    text = render(found)
    assert "the best plan, if replicas meet after so many steps:" in text
    assert "replicas meet every 12 steps" in text
    assert "last meeting" in text  # what is kept of it in memory


def test_auto_leaves_out_numbers_of_steps_that_fragments_do_not_divide() -> None:
    profile, spec = chain(3, 2, 0), platform(2)
    wanted = replace(AUTO, sync_fragments=3, sync_delay=1)
    plan = optimize(profile, spec, wanted)
    assert (plan.sync_every, plan.sync_fragments, plan.sync_delay) == (12, 3, 1)
    found = explain(plan, profile, spec, wanted)
    assert [row.sync_every for row in found.rounds] == [1, 4, 8, 12]
    assert "replicas meet every 12 steps in 3 fragments, 1 late" in render(found)


ALWAYS: dict[str, Any] = {"sync_every": 1, "sync_every_at_most": None, "outer_momentum": 0.0}


def test_auto_changes_nothing_where_meetings_do_not_matter() -> None:
    profile, spec = chain(3, 2, 0), platform(2)
    alone = optimize(profile, spec, replace(AUTO, replicas=(1,)))
    assert (alone.sync_every, alone.outer_momentum) == (1, 0.0)
    assert alone.stages == optimize(profile, spec, replace(AUTO, replicas=(1,), **ALWAYS)).stages


def test_auto_sums_in_every_step_where_there_is_no_room_for_more() -> None:
    """Of four replicas, the only number allowed, none has room for the parameters of the last meeting."""
    profile, spec = chain(1, 1, 3), platform(1)
    wanted = replace(AUTO, replicas=(4,), optimizer=OptimizerKind.ADAM, **ALWAYS)
    needs = optimize(profile, spec, wanted).estimate
    assert needs is not None
    spare = spec.sizes[0].memory_bytes - needs.peak_memory_bytes
    tight = replace(profile, base_memory_bytes=profile.base_memory_bytes + spare - MB)
    found = optimize(tight, spec, replace(AUTO, replicas=(4,), optimizer=OptimizerKind.ADAM))
    assert found.sync_every == 1
    with pytest.raises(Infeasible):
        optimize(tight, spec, replace(wanted, sync_every=12))


def test_what_if_says_what_meetings_buy_after_the_changes() -> None:
    profile, spec = chain(3, 2, 0), platform(2)
    slow = what_if(profile, spec, AUTO, Changes(bandwidth=0.5)).rounds
    fast = what_if(profile, spec, AUTO, Changes(bandwidth=4.0)).rounds
    assert [row.sync_every for row in slow] == [1, 2, 4, 8, 12]
    assert slow[0].iteration_s > fast[0].iteration_s
    assert not what_if(profile, spec, replace(AUTO, **ALWAYS), Changes(bandwidth=2.0)).rounds


def test_a_single_problem_knows_how_often_replicas_meet() -> None:
    with pytest.raises(InvalidValue, match="sync_every must be a number of steps, or end"):
        Problem(profile=chain(3, 2, 0), spec=platform(2), training=AUTO)
