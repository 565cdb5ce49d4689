"""The mixed-integer programmes against the exact search, with every solver that is installed."""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

import pytest

from funcpipe.core import SYNC_WIRES, Optimality, Pins, Plan, Recompute, ScheduleKind, Sync, TiedParameter, TrainingSpec
from funcpipe.errors import Infeasible, InvalidValue, SolverUnavailable
from funcpipe.partitioner.optimize import optimize
from funcpipe.partitioner.problem.problem import Problem
from funcpipe.partitioner.search.exact import exact
from tests.examples import in_long_run
from tests.partitioner.instances import MB, chain, platform

if TYPE_CHECKING:
    from funcpipe.partitioner.mip import Solver


Policy = Callable[[Problem], Plan]


def policy(name: str) -> Callable[..., Plan]:
    """Of the module of solvers, which loads Pyomo: other tests are collected without it."""
    found: Callable[..., Plan] = getattr(import_module("funcpipe.partitioner.mip"), name)
    return found


def by_chain_form(problem: Problem, solver: str) -> Plan:
    """In the paper's form, by a solver whose name is in capitals."""
    return policy("chain_form")(problem, getattr(import_module("funcpipe.partitioner.mip"), solver))


WAYS = (Sync.THREE_PHASE, Sync.PIPELINED, Sync.ALL_REDUCE)
"""Those without streams: of the others, the exact search may take other streams for each stage."""


def check(problem: Problem, solver: Policy) -> None:
    try:
        expected = exact(problem)
    except Infeasible:
        with pytest.raises(Infeasible):
            solver(problem)
        return
    found = solver(problem)
    assert found.solver
    assert found.estimate
    assert expected.solver
    assert found.solver.objective == pytest.approx(expected.solver.objective, rel=1e-6)
    assert found.solver.objective == pytest.approx(problem.goal.of_plan(found))
    assert found.solver.status is Optimality.OPTIMAL
    assert found.solver.bound == pytest.approx(found.solver.objective, rel=1e-5)


def modes(seed: int, layers: int, sizes: int, replicas: tuple[int, ...] = (1, 2)) -> list[Problem]:
    profile, spec = chain(layers, sizes, seed, skips=seed % 3), platform(sizes)
    weighted = TrainingSpec(
        global_batch=16,
        replicas=replicas,
        time_value=[0.0, 30.0][seed % 2],
        wire_sync=SYNC_WIRES[seed // 2 % 3],
        sync=WAYS[seed % 3],
    )
    problem = Problem(profile=profile, spec=spec, training=weighted)
    best = exact(problem).estimate
    assert best
    limits = (
        weighted,
        replace(weighted, deadline_s=best.iteration_s * 0.95),
        replace(weighted, budget_usd=best.cost_usd * 1.1),
    )
    return [replace(problem, training=training) for training in limits]


@pytest.mark.parametrize("seed", [*range(3), *in_long_run(range(3, 6))])
def test_highs_equals_the_exact_search(seed: int) -> None:
    for problem in modes(seed, 4, 2):
        check(problem, policy("highs"))


@pytest.mark.parametrize("seed", range(2))
def test_one_way_for_all_stages_is_no_better_than_one_for_each(seed: int) -> None:
    for problem in modes(seed, 4, 2):
        free = replace(problem, training=replace(problem.training, sync=None))
        try:
            found = policy("highs")(free).solver
        except Infeasible:
            continue
        best = exact(free).solver
        assert found
        assert best
        assert found.sync_ways
        assert best.sync_ways is None
        assert best.objective <= found.objective * (1 + 1e-6)


@pytest.mark.parametrize("seed", [*range(3), *in_long_run(range(3, 6))])
def test_gurobi_equals_the_exact_search(seed: int) -> None:
    for problem in modes(seed, 4, 2):
        check(problem, policy("gurobi"))


@pytest.mark.long
def test_scip_equals_the_exact_search() -> None:
    for problem in modes(1, 3, 2, (2,)):
        check(problem, policy("scip"))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ten", range(10))
@pytest.mark.parametrize(("solver", "layers", "sizes"), [("highs", 7, 2), ("gurobi", 4, 2), ("scip", 6, 2)])
def test_every_solver_equals_the_exact_search_on_a_hundred_larger_ones(
    solver: str, layers: int, sizes: int, ten: int
) -> None:
    for seed in range(10 * ten, 10 * ten + 10):
        check(modes(seed, layers, sizes, (2,))[seed % 3], policy(solver))


PAPER = TrainingSpec(
    global_batch=16,
    time_value=20.0,
    recompute=Recompute.NEVER,
    schedule=ScheduleKind.GPIPE,
    sync=Sync.PIPELINED,
)


@pytest.mark.parametrize(("layers", "batch"), [(3, 16), (4, 32)])
def test_the_papers_programme_can_be_asked_for_by_name(layers: int, batch: int) -> None:
    profile, spec, training = chain(layers, 2, 7), platform(2, shared_cores=2), replace(PAPER, global_batch=batch)
    by_paper, expected = (optimize(profile, spec, training, solver=name) for name in ("paper", "exact"))
    assert by_paper.solver
    assert expected.solver
    assert by_paper.solver.name.endswith("(paper)")
    assert by_paper.solver.status is Optimality.OPTIMAL
    assert by_paper.solver.objective == pytest.approx(expected.solver.objective, rel=1e-6)


def test_where_gurobi_will_not_do_the_papers_programme_goes_to_scip(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(problem: Problem, solver: "Solver", *, time_limit_s: float | None = None) -> Plan:
        asked.append(solver.name)
        if solver.name == "gurobi":
            raise SolverUnavailable("no licence")
        return exact(problem)

    monkeypatch.setattr("funcpipe.partitioner.mip.chain_form", answer)
    assert policy("paper")(Problem(profile=chain(3, 2), spec=platform(2), training=PAPER)).solver
    assert asked == ["gurobi", "scip"]


@pytest.mark.parametrize("seed", range(4))
def test_the_papers_form_equals_the_exact_search(seed: int) -> None:
    training = TrainingSpec(
        global_batch=16,
        time_value=20.0 * (seed % 2),
        recompute=Recompute.NEVER,
        schedule=ScheduleKind.GPIPE,
        sync=Sync.PIPELINED,
    )
    problem = Problem(profile=chain(4 + seed % 2, 2, seed), spec=platform(2), training=training)
    check(problem, lambda problem: by_chain_form(problem, "GUROBI"))


def test_the_papers_form_by_scip_within_a_budget() -> None:
    training = TrainingSpec(
        global_batch=16, budget_usd=0.01, recompute=Recompute.NEVER, schedule=ScheduleKind.GPIPE, sync=Sync.PIPELINED
    )
    problem = Problem(profile=chain(4, 2, 5), spec=platform(2), training=training)
    check(problem, lambda problem: by_chain_form(problem, "SCIP"))


@pytest.mark.parametrize(
    ("skips", "training", "message"),
    [
        (3, PAPER, "must be the next layer alone, in a chain"),
        (0, TrainingSpec(global_batch=16, recompute=Recompute.NEVER), "schedule must be 'gpipe' .* got 'auto'"),
        (0, TrainingSpec(global_batch=16), "recompute must be 'never' in the paper's form"),
        (0, replace(PAPER, sync=None), "sync must be 'three-phase' or 'pipelined' in the paper's form, got 'auto'"),
    ],
)
def test_the_papers_form_refuses_what_it_cannot_say(skips: int, training: TrainingSpec, message: str) -> None:
    problem = Problem(profile=chain(5, 2, 1, skips=skips), spec=platform(2), training=training)
    with pytest.raises(InvalidValue, match=message):
        by_chain_form(problem, "GUROBI")


def test_the_papers_form_knows_neither_pins_nor_shared_parameters() -> None:
    pinned = Problem(profile=chain(3, 2), spec=platform(2), training=PAPER, pins=Pins(max_memory_mb=1024))
    tie = TiedParameter(name="tied", layers=(0, 2), parameter_bytes=8)
    tied = Problem(profile=replace(chain(3, 2), ties=(tie,)), spec=platform(2), training=PAPER)
    for problem, message in ((pinned, "cannot be combined with shared links or pins"), (tied, "tied parameters cost")):
        with pytest.raises(InvalidValue, match=message):
            policy("paper")(problem)


def test_the_papers_form_says_when_there_is_no_plan() -> None:
    large = replace(chain(3, 2), base_memory_bytes=9000 * MB)
    with pytest.raises(Infeasible, match="needs at least"):
        policy("paper")(Problem(profile=large, spec=platform(2), training=PAPER))


def test_the_papers_form_is_not_linear() -> None:
    training = TrainingSpec(
        global_batch=16, recompute=Recompute.NEVER, schedule=ScheduleKind.GPIPE, sync=Sync.PIPELINED
    )
    with pytest.raises(SolverUnavailable, match=r"has products, which this solver refuses; use gurobi or scip"):
        by_chain_form(Problem(profile=chain(3, 2), spec=platform(2), training=training), "HIGHS")


def test_a_licence_for_small_programmes_is_named_and_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(profile=chain(16, 3), spec=platform(), training=TrainingSpec(global_batch=16, replicas=(4,)))
    with pytest.raises(SolverUnavailable, match=r"the licence of gurobi does not admit a programme of \d+ variables"):
        policy("gurobi")(problem)
    asked: list[str] = []

    def refuse(problem: Problem, *, time_limit_s: float | None = None) -> Plan:
        asked.append("scip")
        raise SolverUnavailable("not here")

    monkeypatch.setattr("funcpipe.partitioner.mip.scip", refuse)
    plan = policy("mip")(replace(problem, training=TrainingSpec(global_batch=16, replicas=(4,), deadline_s=20.0)))
    assert asked == ["scip"]
    assert plan.solver
    assert plan.solver.name == "highs"


def test_auto_is_the_exact_search() -> None:
    plan = optimize(chain(4), platform(), TrainingSpec(global_batch=16))
    assert plan.solver
    assert plan.solver.name == "exact"


@pytest.mark.parametrize("solver", ["highs", "gurobi", "scip"])
def test_solvers_say_infeasible(solver: str) -> None:
    large = replace(chain(3), base_memory_bytes=9000 * MB)
    with pytest.raises(Infeasible, match="needs at least"):
        policy(solver)(Problem(profile=large, spec=platform(), training=TrainingSpec(global_batch=16)))
    late = TrainingSpec(global_batch=4, deadline_s=0.01)
    with pytest.raises(Infeasible, match=r"no plan meets the deadline of 0.01 s"):
        policy(solver)(Problem(profile=chain(3), spec=platform(), training=late))


def test_a_time_limit_leaves_a_plan_and_an_honest_bound() -> None:
    training = TrainingSpec(
        global_batch=16, time_value=30.0, replicas=(2,), schedule=ScheduleKind.GPIPE, sync=Sync.PIPELINED
    )
    problem = Problem(profile=chain(12, 3, 2), spec=platform(), training=training)
    optimum = exact(problem).solver
    assert optimum
    try:
        found = policy("highs")(problem, time_limit_s=0.5).solver
    except Infeasible as error:
        assert "time limit" in str(error)  # noqa: PT017
        return
    assert found
    assert found.bound is not None
    assert found.bound <= optimum.objective * (1 + 1e-6) <= found.objective * (1 + 2e-6)
    assert found.status is Optimality.FEASIBLE or found.objective == pytest.approx(optimum.objective, rel=1e-6)
