"""The programme in the paper's own variables, for chains: cuts, replicas and the memory of every layer.

After FuncPipe (Liu et al., POMACS 6(3) 2022, section 3.4): `cut[i]` says whether a stage ends with layer i, `chosen[s]`
which setting (degree of data parallelism and synchronisation) is used, `sized[i, j]` that layer i runs in functions of
size j. Memory and seconds accumulate along the chain and start again at each cut. Next to the stage form it has few
variables and weak bounds: it is here so that the two can be compared.
"""

from dataclasses import fields
from typing import Any

import numpy as np
import pyomo.environ as pyo

from funcpipe.core import MB, Recompute, ScheduleKind, Sync
from funcpipe.errors import InvalidValue, SolverUnavailable
from funcpipe.partitioner.cost.formulas import (
    Array,
    Lanes,
    Setting,
    StageTraffic,
    lane_times,
    request_usd,
)
from funcpipe.partitioner.cost.memory import WASTE, buffer_copies
from funcpipe.partitioner.mip.chain_lanes import (
    ChainProgramme,
    accumulate,
    add_backward,
    add_forward,
    begins,
    of_size,
    where_cut,
)
from funcpipe.partitioner.problem.options import edge_loads
from funcpipe.partitioner.problem.pins import NO_PINS
from funcpipe.partitioner.problem.problem import Choice, Problem
from funcpipe.partitioner.problem.stage_graph import build_stage_graph


def chain_programme(problem: Problem, *, longest_s: float, unit_usd: float) -> ChainProgramme:
    """The programme of a chain. Raises InvalidValue for what the paper's form cannot say."""
    profile, training = problem.profile, problem.training
    for i, tensor in enumerate(profile.tensors):
        if tensor.consumers != (tensor.producer + 1,):
            raise InvalidValue(f"tensors[{i}].consumers", tensor.consumers, "must be the next layer alone, in a chain")
    if training.recompute is not Recompute.NEVER:
        raise InvalidValue("recompute", training.recompute.value, "must be 'never' in the paper's form")
    if training.schedule is not ScheduleKind.GPIPE:
        chosen = "auto" if training.schedule is None else training.schedule.value
        raise InvalidValue("schedule", chosen, "must be 'gpipe' in the paper's form")
    if training.sync not in (Sync.THREE_PHASE, Sync.PIPELINED):
        chosen = "auto" if training.sync is None else training.sync.value
        raise InvalidValue("sync", chosen, "must be 'three-phase' or 'pipelined' in the paper's form")
    if problem.spec.shared_bytes_s is not None or problem.pins != NO_PINS:
        raise InvalidValue("form", "chain", "cannot be combined with shared links or pins")
    if profile.ties:
        raise InvalidValue("form", "chain", "cannot say what tied parameters cost: choose the form 'stage'")
    graph = build_stage_graph(profile, admits=lambda first, stop: stop == first + 1)
    loads, settings = edge_loads(problem, graph), problem.settings()
    lanes = lane_times(loads, settings[0], workers=1)
    return ChainProgramme(
        problem=problem,
        settings=settings,
        lanes=Lanes(**{item.name: _by_layer(getattr(lanes, item.name)) for item in fields(Lanes)}),
        parameter_mb=_by_layer(loads.parameter_bytes)[:, 0] / MB,
        constant_mb=_by_layer(loads.constant_bytes)[:, 0] / MB,
        activation_mb=_by_layer(loads.activation_bytes)[:, 0] / MB,
        held_input_mb=_by_layer(loads.held_input_bytes)[:, 0] / MB,
        workspace_mb=_by_layer(loads.workspace_bytes)[:, 0] / MB,
        cut_usd=_cut_usd(problem, loads.traffic),
        longest_s=longest_s,
        unit_usd=unit_usd,
    )


def _by_layer(rows: Array) -> Array:
    """The stage graph lists the last layer first."""
    return rows[::-1]


def _cut_usd(problem: Problem, traffic: StageTraffic) -> Array:
    """Dollars of the messages over each cut: what the layer before it and the layer behind it put and get."""
    spec = problem.spec
    out, back_in = _by_layer(traffic.forward_out_objects)[:, 0], _by_layer(traffic.backward_in_objects)[:, 0]
    before = request_usd(out, back_in, spec)
    back_out, into = _by_layer(traffic.backward_out_objects)[:, 0], _by_layer(traffic.forward_in_objects)[:, 0]
    behind = request_usd(back_out, into, spec)
    dollars: Array = problem.micro_batches * (before + np.append(behind[1:], 0.0))
    return dollars


def build_chain_model(programme: ChainProgramme, linear: bool) -> pyo.ConcreteModel:
    """The quadratic programme: both the price and the seconds are continuous, so their product has no linear form."""
    if linear:
        raise SolverUnavailable("the paper's form has products, which this solver refuses; use gurobi or scip")
    m = pyo.ConcreteModel()
    problem = programme.problem
    m.layers = pyo.RangeSet(0, len(problem.profile.layers) - 1)
    m.sizes = pyo.RangeSet(0, len(problem.spec.sizes) - 1)
    m.settings = pyo.RangeSet(0, len(programme.settings) - 1)
    m.cut = pyo.Var(m.layers, domain=pyo.Binary)
    m.sized = pyo.Var(m.layers, m.sizes, domain=pyo.Binary)
    m.chosen = pyo.Var(m.settings, domain=pyo.Binary)
    m.iteration_s = pyo.Var(bounds=(0, programme.longest_s))
    m.cut[m.layers.at(-1)].fix(1)
    m.one_setting_is_chosen = pyo.Constraint(expr=pyo.quicksum(m.chosen[s] for s in m.settings) == 1)
    _add_sizes(m)
    _add_memory(m, programme)
    add_forward(m, programme)
    add_backward(m, programme)
    _add_iteration(m, programme)
    _add_money(m, programme)
    return m


def read_chain(m: pyo.ConcreteModel, programme: ChainProgramme) -> tuple[Setting, list[Choice]]:
    """The setting and the stages of a solved model."""
    setting = next(programme.settings[s] for s in m.settings if pyo.value(m.chosen[s]) > 0.5)
    choices, first = [], 0
    for layer in m.layers:
        if pyo.value(m.cut[layer]) > 0.5:
            size = next(j for j in m.sizes if pyo.value(m.sized[layer, j]) > 0.5)
            choices.append(Choice(first, layer + 1, size, False))
            first = layer + 1
    return setting, choices


def _add_sizes(m: pyo.ConcreteModel) -> None:
    """Each layer has one size, and the same as the layer before where there is no cut between them."""

    def one(m: Any, i: int) -> Any:
        return pyo.quicksum(m.sized[i, j] for j in m.sizes) == 1

    def same(m: Any, i: int, j: int) -> Any:
        return m.sized[i, j] <= m.sized[i - 1, j] + m.cut[i - 1] if i > 0 else pyo.Constraint.Skip

    m.each_layer_has_one_size = pyo.Constraint(m.layers, rule=one)
    m.a_stage_has_one_size = pyo.Constraint(m.layers, m.sizes, rule=same)


def _add_memory(m: pyo.ConcreteModel, programme: ChainProgramme) -> None:
    """What a stage holds when its last layer is counted fits its functions (in megabytes)."""
    amounts = {"parameter": programme.parameter_mb, "constant": programme.constant_mb}
    held = {name: accumulate(m, f"{name}_mb", mb.__getitem__, mb.sum(), backward=False) for name, mb in amounts.items()}
    own, copied = programme.activation_mb, programme.held_input_mb
    amounts["activation"] = own + copied  # what a stage keeps of its input counts with its first layer
    held["activation"] = accumulate(
        m, "activation_mb", lambda i: own[i] + copied[i] * begins(m, i), (own + copied).sum(), backward=False
    )
    m.workspace_mb = pyo.Var(m.layers, domain=pyo.NonNegativeReals)
    m.workspace_is_the_largest_of_the_stage = pyo.ConstraintList()
    most_mb = float(programme.workspace_mb.max())
    for i in m.layers:
        m.workspace_is_the_largest_of_the_stage.add(m.workspace_mb[i] >= float(programme.workspace_mb[i]))
        if i > 0:
            before = m.workspace_mb[i - 1] - most_mb * begins(m, i)
            m.workspace_is_the_largest_of_the_stage.add(m.workspace_mb[i] >= before)
    sizes_mb = np.array([size.memory_mb for size in programme.problem.spec.sizes], dtype=np.float64)

    def fit(m: Any, i: int, s: int) -> Any:
        setting = programme.settings[s]
        copies = 2 + setting.values_per_parameter + buffer_copies(setting.replicas)
        factors = {"parameter": copies, "constant": 1, "activation": (1 + WASTE) * setting.micro_batches_each}
        base_mb = setting.base_bytes / MB
        needs = sum(factor * held[name][i] for name, factor in factors.items())
        needs = base_mb + (1 + WASTE) * m.workspace_mb[i] + needs
        most = sum(factor * float(amounts[name].sum()) for name, factor in factors.items())
        most = base_mb + (1 + WASTE) * most_mb + most
        return needs <= of_size(m, i, sizes_mb) + most * (1 - m.chosen[s])

    m.a_stage_fits_its_functions = pyo.Constraint(m.layers, m.settings, rule=fit)


def _add_iteration(m: pyo.ConcreteModel, programme: ChainProgramme) -> None:
    """Seconds of an iteration under the chosen setting (FuncPipe, section 3.2)."""
    lanes, spec = programme.lanes, programme.problem.spec

    def finish(m: Any, i: int, s: int) -> Any:
        repeats = programme.settings[s].micro_batches_each - 1
        forward_s = m.forward_sum_s + repeats * m.forward_lane_s
        backward_s = m.backward_sum_s[i] + repeats * m.backward_lane_s[i]
        unchosen = (repeats + 2) * programme.longest_s * (1 - m.chosen[s])
        return forward_s + backward_s + m.sync_s[i] <= m.iteration_s + unchosen

    m.an_iteration_ends_with_the_last_synchronisation = pyo.Constraint(m.layers, m.settings, rule=finish)
    if spec.shared_cores is not None:
        share = programme.problem.micro_batches / spec.shared_cores
        work = pyo.quicksum(of_size(m, i, share * (lanes.forward_s[i] + lanes.backward_s[i])) for i in m.layers)
        m.shared_processors_do_all_the_work = pyo.Constraint(expr=work <= m.iteration_s)


def _add_money(m: pyo.ConcreteModel, programme: ChainProgramme) -> None:
    """Dollars of functions and requests, in the programme's unit; the goal."""
    problem, unit, goal = programme.problem, programme.unit_usd, programme.problem.goal
    prices = np.array([size.price_usd_s for size in problem.spec.sizes]) / unit
    rent = where_cut(m, "rent", np.tile(prices, (len(m.layers), 1)), lambda i: begins(m, i))
    most = float(prices.max()) * len(m.layers) * max(setting.replicas for setting in programme.settings)
    m.price = pyo.Var(bounds=(0, most))
    m.requests = pyo.Var(domain=pyo.NonNegativeReals)
    stages = pyo.quicksum(m.cut[i] for i in m.layers)
    messages = pyo.quicksum(programme.cut_usd[i] / unit * m.cut[i] for i in m.layers)
    m.money = pyo.ConstraintList()
    for s, setting in enumerate(programme.settings):
        unchosen = 1 - m.chosen[s]
        m.money.add(setting.replicas * pyo.quicksum(rent[i] for i in m.layers) <= m.price + most * unchosen)
        m.money.add(setting.replicas * stages <= problem.max_functions + setting.replicas * len(m.layers) * unchosen)
        alone = _sync_usd(setting) / unit
        m.money.add(messages + alone * stages <= m.requests + alone * len(m.layers) * unchosen)
    dollars = m.price * m.iteration_s + m.requests
    if goal.counts_seconds:
        m.the_budget_suffices = pyo.Constraint(expr=dollars <= goal.budget_usd / unit)
        m.objective = pyo.Objective(expr=m.iteration_s)
    else:
        m.objective = pyo.Objective(expr=dollars + goal.time_value_usd_s / unit * m.iteration_s)


def _sync_usd(setting: Setting) -> float:
    """Dollars of one stage's requests for synchronisation."""
    puts = setting.replicas**2 if setting.replicas > 1 else 0
    gets = setting.replicas * 2 * (setting.replicas - 1)
    return float(request_usd(np.array(puts), np.array(gets), setting.spec))
