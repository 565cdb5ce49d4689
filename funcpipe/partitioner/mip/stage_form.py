"""The optimisation problem as a mixed-integer programme: one binary variable for each stage that a plan may have.

Under one setting, all terms of the cost model are constants of a stage, or sums or maxima over the chosen stages:
linear rows, whose coefficients are the `StageCosts` of the options. Only the price of the functions times the seconds
of an iteration is a product, so the programme is quadratic and not convex (FuncPipe, Liu et al., POMACS 6(3) 2022,
section 3.4). `build_model` writes the product as it is, for solvers that accept it, or linearised without loss:
`rented_s[o]` = `taken[o]` · `iteration_s`, as a second flow along the path.

By hand, for the network of two layers in `search/option_network`: the variables are taken[0], taken[1] and taken[2].
The path leaves the start once, taken[1] + taken[2] = 1, and what enters node 1 leaves it, taken[0] = taken[1]. The
requests of a plan are the sum of taken[o] · request_usd[o], its price that of taken[o] · price_usd_s[o].
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pyomo.environ as pyo

from funcpipe.partitioner.cost import Array
from funcpipe.partitioner.cost.loads import Setting
from funcpipe.partitioner.cost.pipeline import StageCosts, dollars, ended_s, round_trip_s, synchronised_s
from funcpipe.partitioner.problem.goal import Goal
from funcpipe.partitioner.problem.options import Options
from funcpipe.partitioner.problem.problem import StageChoice
from funcpipe.partitioner.problem.stage_graph import StageGraph
from funcpipe.partitioner.search.option_network import OptionNetwork


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProgramme:
    """All that the model is built from: plans of `fewest` to `most` stages, none of which takes over `longest_s`.

    The stages taken are a path through `network` from its start to its node 0. `unit_usd` is the dollar amount that the
    solver sees as 1, so that its tolerances mean something.
    """

    graph: StageGraph
    network: OptionNetwork
    goal: Goal
    fewest: int
    most: int
    longest_s: float
    unit_usd: float

    @property
    def options(self) -> Options:
        """The stages that may be taken."""
        return self.network.options

    @property
    def costs(self) -> StageCosts:
        """The costs of each of them."""
        return self.network.costs

    @property
    def setting(self) -> Setting:
        """The setting of all of them."""
        return self.network.setting


def build_model(programme: StageProgramme, linear: bool) -> pyo.ConcreteModel:
    """The programme of one setting; `linear` replaces the product by its exact linearisation."""
    m = pyo.ConcreteModel()
    m.options = pyo.RangeSet(0, len(programme.options) - 1)
    m.layers = pyo.RangeSet(0, programme.graph.layers - 1)
    m.taken = pyo.Var(m.options, domain=pyo.Binary)
    m.iteration_s = pyo.Var(bounds=(programme.setting.loading_s, programme.longest_s))
    _add_path(m, programme)
    _add_lanes(m, programme)
    _add_time(m, programme)
    _add_rounds(m, programme)
    if linear:
        _add_rented_seconds(m, programme)
    _add_goal(m, programme, linear=linear)
    return m


def read_choices(m: pyo.ConcreteModel, programme: StageProgramme) -> list[StageChoice]:
    """The stages that a solved model has taken, in order."""
    taken = [option for option in m.options if pyo.value(m.taken[option]) > 0.5]
    choices = [programme.options.choice(option, 0, programme.graph) for option in taken]
    return sorted(choices, key=lambda choice: choice.first)


def _add_path(m: pyo.ConcreteModel, programme: StageProgramme) -> None:
    """The stages taken follow one another from the first layer to the last."""
    start = programme.network.start
    leaving, entering = _at_nodes(programme)
    m.nodes = pyo.RangeSet(1, start)

    def follow(m: Any, node: int) -> Any:
        started = 1 if node == start else 0
        return _sum(m.taken, leaving[node]) == started + _sum(m.taken, entering[node])

    m.stages_follow_one_another = pyo.Constraint(m.nodes, rule=follow)
    stages = _sum(m.taken, m.options)
    m.stages_are_limited = pyo.Constraint(expr=pyo.inequality(programme.fewest, stages, programme.most))


def _add_lanes(m: pyo.ConcreteModel, programme: StageProgramme) -> None:
    """The slowest lane forward; the slowest lane backward of the stages that start at a layer or behind it."""
    costs = programme.costs
    covering, starting = _at_layers(programme)
    m.forward_lane_s = pyo.Var(domain=pyo.NonNegativeReals)
    m.backward_lane_s = pyo.Var(m.layers, domain=pyo.NonNegativeReals)

    def forward(m: Any, layer: int) -> Any:
        return _sum(m.taken, covering[layer], costs.forward_lane_s) <= m.forward_lane_s

    def backward(m: Any, layer: int) -> Any:
        return _sum(m.taken, covering[layer], costs.backward_lane_s) <= m.backward_lane_s[0]

    def starts_here(m: Any, layer: int) -> Any:
        return _sum(m.taken, starting[layer], costs.backward_lane_s) <= m.backward_lane_s[layer]

    def starts_behind(m: Any, layer: int) -> Any:
        if layer == m.layers.at(-1):
            return pyo.Constraint.Skip
        return m.backward_lane_s[layer + 1] <= m.backward_lane_s[layer]

    m.no_forward_lane_beats_the_slowest = pyo.Constraint(m.layers, rule=forward)
    m.no_backward_lane_beats_the_slowest = pyo.Constraint(m.layers, rule=backward)
    m.a_stages_backward_lane_counts_from_its_first_layer = pyo.Constraint(m.layers, rule=starts_here)
    m.backward_lanes_count_towards_the_front = pyo.Constraint(m.layers, rule=starts_behind)


def _add_time(m: pyo.ConcreteModel, programme: StageProgramme) -> None:
    """Seconds of an iteration: the pipeline fills once, then follows its slowest lane (FuncPipe, section 3.2)."""
    costs, setting = programme.costs, programme.setting
    _, starting = _at_layers(programme)
    m.backward_sum_s = pyo.Var(m.layers, domain=pyo.NonNegativeReals)
    m.finish_s = pyo.Var(domain=pyo.NonNegativeReals)

    def run_backward(m: Any, layer: int) -> Any:
        behind = m.backward_sum_s[layer + 1] if layer < m.layers.at(-1) else 0.0
        return m.backward_sum_s[layer] == behind + _sum(m.taken, starting[layer], costs.backward_sum_s)

    def synchronise(m: Any, layer: int) -> Any:
        sync_s = _sum(m.taken, starting[layer], costs.sync_s)
        ended = synchronised_s(m.backward_sum_s[layer], m.backward_lane_s[layer], sync_s, setting.meeting_repeats)
        return ended <= m.finish_s

    forward_s = _sum(m.taken, m.options, costs.forward_sum_s)
    whole_s = ended_s(forward_s, m.forward_lane_s, m.finish_s, setting.repeats)
    whole_s = whole_s + setting.local_repeats * m.backward_lane_s[0]
    m.backwards_run_from_the_last_stage = pyo.Constraint(m.layers, rule=run_backward)
    m.synchronisation_follows_a_stages_last_backward = pyo.Constraint(m.layers, rule=synchronise)
    m.an_iteration_is_forward_and_backward = pyo.Constraint(expr=whole_s <= m.iteration_s)
    if setting.seconds_per_work:
        work_s = _sum(m.taken, m.options, setting.seconds_per_work * costs.work_s)
        m.shared_processors_do_all_the_work = pyo.Constraint(expr=work_s <= m.iteration_s)


def _add_rounds(m: pyo.ConcreteModel, programme: StageProgramme) -> None:
    """The pace of a stage that holds few micro-batches: a share of the round trip of one (see `cost/pipeline`)."""
    options, costs, graph = programme.options, programme.costs, programme.graph
    _, starting = _at_layers(programme)
    m.forward_sum_s = pyo.Var(m.layers, domain=pyo.NonNegativeReals)
    m.waiting = pyo.Set(initialize=[option for option in m.options if costs.share[option] > 0])

    def run_forward(m: Any, layer: int) -> Any:
        behind = m.forward_sum_s[layer + 1] if layer < m.layers.at(-1) else 0.0
        return m.forward_sum_s[layer] == behind + _sum(m.taken, starting[layer], costs.forward_sum_s)

    def wait(m: Any, option: int) -> Any:
        stop, share = int(graph.stop[options.edge[option]]), float(costs.share[option])
        forward_s, backward_s = (m.forward_sum_s[stop], m.backward_sum_s[stop]) if stop in m.layers else (0.0, 0.0)
        pace_s = share * round_trip_s(forward_s, backward_s, float(costs.round_s[option]))
        return pace_s <= m.forward_lane_s + share * programme.longest_s * (1 - m.taken[option])

    if len(m.waiting):
        m.forwards_run_to_the_last_stage = pyo.Constraint(m.layers, rule=run_forward)
        m.no_stage_begins_before_it_may = pyo.Constraint(m.waiting, rule=wait)


def _add_rented_seconds(m: pyo.ConcreteModel, programme: StageProgramme) -> None:
    """`rented_s` flows along the path of the stages taken, all of `iteration_s` through each of them."""
    start = programme.network.start
    leaving, entering = _at_nodes(programme)
    m.rented_s = pyo.Var(m.options, bounds=(0, programme.longest_s))

    def flow(m: Any, node: int) -> Any:
        started = m.iteration_s if node == start else 0.0
        return _sum(m.rented_s, leaving[node]) == started + _sum(m.rented_s, entering[node])

    def rent(m: Any, option: int) -> Any:
        return m.rented_s[option] <= programme.longest_s * m.taken[option]

    m.seconds_flow_along_the_path = pyo.Constraint(m.nodes, rule=flow)
    m.only_stages_taken_are_rented = pyo.Constraint(m.options, rule=rent)


def _add_goal(m: pyo.ConcreteModel, programme: StageProgramme, *, linear: bool) -> None:
    """Dollars and the value of time, or seconds within a budget."""
    costs, goal, unit = programme.costs, programme.goal, programme.unit_usd
    requests, price = _sum(m.taken, m.options, costs.request_usd / unit), costs.price_usd_s / unit
    if linear:
        cost = _sum(m.rented_s, m.options, price) + requests
    else:
        cost = dollars(_sum(m.taken, m.options, price), m.iteration_s, requests)
    if goal.counts_seconds:
        m.the_budget_suffices = pyo.Constraint(expr=cost <= goal.budget_usd / unit)
        m.objective = pyo.Objective(expr=m.iteration_s)
    else:
        m.objective = pyo.Objective(expr=cost + goal.time_value_usd_s / unit * m.iteration_s)


def _sum(variables: Any, which: Iterable[int], factors: Array | None = None) -> Any:
    """The sum of the variables `which`, each times its factor."""
    if factors is None:
        return pyo.quicksum(variables[i] for i in which)
    return pyo.quicksum(float(factors[i]) * variables[i] for i in which)


_Lists = dict[int, list[int]]


def _at_nodes(programme: StageProgramme) -> tuple[_Lists, _Lists]:
    """For each node of the network the options that leave it towards the end, and those that enter it."""
    leaving: _Lists = {node: [] for node in range(programme.network.start + 1)}
    entering: _Lists = {node: [] for node in leaving}
    for option, (before, after) in enumerate(zip(programme.options.before, programme.options.after, strict=True)):
        leaving[int(before)].append(option)
        entering[int(after)].append(option)
    return leaving, entering


def _at_layers(programme: StageProgramme) -> tuple[_Lists, _Lists]:
    """For each layer the options that hold it, and those that start with it."""
    covering: _Lists = {layer: [] for layer in range(programme.graph.layers)}
    starting: _Lists = {layer: [] for layer in covering}
    for option, edge in enumerate(programme.options.edge):
        first, stop = int(programme.graph.first[edge]), int(programme.graph.stop[edge])
        starting[first].append(option)
        for layer in range(first, stop):
            covering[layer].append(option)
    return covering, starting
