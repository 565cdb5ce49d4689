"""The programme in the paper's own variables, for chains: cuts, replicas and the memory of every layer.

After FuncPipe (Liu et al., POMACS 6(3) 2022, section 3.4): `cut[i]` says whether a stage ends with layer i, `chosen[s]`
which setting (degree of data parallelism and synchronisation) is used, `sized[i, j]` that layer i runs on functions of
size j. Memory and seconds accumulate along the chain and start again at each cut. All coefficients come from the cost
model, as if each layer were a stage of its own. Compared to the stage form it has few variables and weak bounds.

By hand, `accumulate` for three layers of 1 s each:

    layer                    0       1       2
    cut behind it            yes     no      yes        two stages: [0, 1) and [1, 3)
    x_i >=                   1       1       1 + x₁     x₁ >= 1 + x₀ − total · cut₀ does not bind
    minimised                1 s     1 s     2 s        the last layer of a stage has the sum of the stage
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pyomo.environ as pyo

from funcpipe.core import MB, NO_PINS, Recompute, ScheduleKind, Sync, TrainingSpec
from funcpipe.errors import InvalidValue, SolverUnavailable
from funcpipe.partitioner.cost import Array
from funcpipe.partitioner.cost.formulas import (
    Lanes,
    buffer_copies,
    compute_work_s,
    lane_times,
    parameter_copies,
    state_bytes,
    waste_bytes,
)
from funcpipe.partitioner.cost.loads import Setting, StageTraffic
from funcpipe.partitioner.cost.pipeline import dollars, ended_s, synchronised_s
from funcpipe.partitioner.cost.stores import message_requests, pace_of, request_usd, sync_requests
from funcpipe.partitioner.mip.chain_sync import paced_lines, sync_s
from funcpipe.partitioner.mip.chain_terms import accumulate, begins, of_size, where_cut
from funcpipe.partitioner.problem.cuts import Borders
from funcpipe.partitioner.problem.options import edge_loads
from funcpipe.partitioner.problem.problem import Problem, StageChoice
from funcpipe.partitioner.problem.stage_graph import build_stage_graph


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainProgramme:
    """The programme that the model is built from, as if each layer were a stage of its own.

    `lanes` and `work_s` have a row for each layer and a column for each size, the other arrays an element for each
    layer. `cut_usd` is what the requests cost that a cut behind a layer makes in an iteration.
    """

    problem: Problem
    settings: Sequence[Setting]
    lanes: Lanes
    parameter_mb: Array
    constant_mb: Array
    activation_mb: Array
    held_input_mb: Array
    workspace_mb: Array
    work_s: Array
    cut_usd: Array
    longest_s: float
    unit_usd: float


def add_forward(m: pyo.ConcreteModel, programme: ChainProgramme) -> None:
    """The slowest lane of all stages forward, and the sum of all lanes."""
    lanes, most = programme.lanes, programme.longest_s
    compute = accumulate(m, "forward_s", lambda i: of_size(m, i, lanes.forward_s[i]), most, backward=False)
    upload = where_cut(m, "forward_upload_s", lanes.forward_upload_s, lambda i: m.cut[i])
    download = where_cut(m, "forward_download_s", lanes.forward_download_s, lambda i: begins(m, i))
    found = where_cut(m, "forward_found_s", lanes.forward_found_s, lambda i: begins(m, i))
    m.forward_lane_s = pyo.Var(domain=pyo.NonNegativeReals)
    m.lanes_forward = pyo.ConstraintList()
    for i in m.layers:
        for lane in (compute, upload, download):
            m.lanes_forward.add(lane[i] <= m.forward_lane_s)
    m.forward_sum_s = pyo.Expression(
        expr=pyo.quicksum(of_size(m, i, lanes.forward_s[i]) + upload[i] + found[i] + download[i] for i in m.layers)
    )


def add_backward(m: pyo.ConcreteModel, programme: ChainProgramme) -> None:
    """Lanes and sums of the layers from each one on, and the synchronisation of the stage that begins with it."""
    lanes, most = programme.lanes, programme.longest_s
    compute = accumulate(m, "backward_s", lambda i: of_size(m, i, lanes.backward_s[i]), most, backward=True)
    upload = where_cut(m, "backward_upload_s", lanes.backward_upload_s, lambda i: begins(m, i))
    download = where_cut(m, "backward_download_s", lanes.backward_download_s, lambda i: m.cut[i])
    found = where_cut(m, "backward_found_s", lanes.backward_found_s, lambda i: m.cut[i])
    m.backward_lane_s = pyo.Var(m.layers, domain=pyo.NonNegativeReals)
    m.lanes_backward = pyo.ConstraintList()
    for i in m.layers:
        for lane in (compute, upload, download):
            m.lanes_backward.add(lane[i] <= m.backward_lane_s[i])
        if i > 0:
            m.lanes_backward.add(m.backward_lane_s[i] <= m.backward_lane_s[i - 1])
    m.backward_sum_s = pyo.Expression(
        m.layers,
        rule=lambda m, i: pyo.quicksum(
            of_size(m, k, lanes.backward_s[k]) + upload[k] + found[k] + download[k] for k in m.layers if k >= i
        ),
    )
    _add_sync(m, programme)


def _add_sync(m: pyo.ConcreteModel, programme: ChainProgramme) -> None:
    """Seconds linear in the parameters of the stage, with a slope for each setting and size."""
    parameter_mb = programme.parameter_mb
    owed = accumulate(m, "owed_mb", parameter_mb.__getitem__, parameter_mb.sum(), backward=True)
    m.sync_s = pyo.Var(m.layers, domain=pyo.NonNegativeReals)

    whole_mb = float(parameter_mb.sum())

    def last(m: Any, i: int, s: int, j: int) -> Any:
        setting, size = programme.settings[s], programme.problem.spec.sizes[j]
        fixed_s = sync_s(setting, size, 0.0)
        slope_s = sync_s(setting, size, 1.0) - fixed_s
        most_s = sync_s(setting, size, whole_mb)
        return m.sync_s[i] >= fixed_s + slope_s * owed[i] - most_s * (2 - m.chosen[s] - m.sized[i, j])

    m.synchronisation_takes_its_time = pyo.Constraint(m.layers, m.settings, m.sizes, rule=last)
    m.requests_wait_for_the_store = pyo.ConstraintList()
    for s, j in itertools.product(m.settings, m.sizes):
        setting, size = programme.settings[s], programme.problem.spec.sizes[j]
        for fixed_s, slope_s in paced_lines(setting, size, least_mb=float(parameter_mb.min()), most_mb=whole_mb):
            most_s = fixed_s + slope_s * whole_mb
            for i in m.layers:
                other = 2 - m.chosen[s] - m.sized[i, j]
                m.requests_wait_for_the_store.add(m.sync_s[i] >= fixed_s + slope_s * owed[i] - most_s * other)


def chain_programme(problem: Problem, *, longest_s: float, unit_usd: float) -> ChainProgramme:
    """The programme of a chain. Raises InvalidValue for what the paper's form cannot express."""
    _check_training(problem.training)
    profile = problem.profile
    for i, tensor in enumerate(profile.tensors):
        if tensor.consumers != (tensor.producer + 1,):
            raise InvalidValue(f"tensors[{i}].consumers", tensor.consumers, "must be the next layer alone, in a chain")
    if problem.spec.shared_bytes_s is not None or problem.spec.requests_s is not None or problem.pins != NO_PINS:
        raise InvalidValue("solver", "paper", "cannot be combined with shared links or pins; use another solver")
    paces = [pace_of(setting.message_store, setting.replicas, 1) for setting in problem.one_way_settings()]
    if max(max(pace.put_s, pace.get_s) for pace in paces) > problem.spec.latency_s:
        raise InvalidValue("solver", "paper", "cannot express messages that wait for their store; use another solver")
    if not problem.stores.is_default:
        raise InvalidValue("solver", "paper", "cannot express several stores; use another solver")
    if profile.data is not None:
        raise InvalidValue("solver", "paper", "cannot express what loading data takes; use another solver")
    if profile.ties:
        raise InvalidValue("solver", "paper", "cannot express what tied parameters cost; use another solver")
    if any(size.accelerator for size in problem.spec.sizes):
        raise InvalidValue("solver", "paper", "cannot express the two memories of GPU functions; use another solver")
    graph = build_stage_graph(profile, Borders.of(len(profile.layers), admits=lambda first, stop: stop == first + 1))
    loads, settings = edge_loads(problem, graph), problem.one_way_settings()
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
        work_s=_by_layer(compute_work_s(loads, lanes, settings[0])),
        cut_usd=_cut_usd(loads.traffic, settings[0]),
        longest_s=longest_s,
        unit_usd=unit_usd,
    )


def _check_training(training: TrainingSpec) -> None:
    if training.recompute is not Recompute.NEVER:
        raise InvalidValue("recompute", training.recompute.value, "must be 'never' in the paper's form")
    if training.schedule is not ScheduleKind.GPIPE:
        chosen = "auto" if training.schedule is None else training.schedule.value
        raise InvalidValue("schedule", chosen, "must be 'gpipe' in the paper's form")
    if training.sync not in (Sync.THREE_PHASE, Sync.PIPELINED):
        chosen = "auto" if training.sync is None else training.sync.value
        raise InvalidValue("sync", chosen, "must be 'three-phase' or 'pipelined' in the paper's form")
    if training.joint_loss:
        raise InvalidValue("joint_loss", True, "cannot be expressed in the paper's form; use another solver")
    if training.sync_delay:
        raise InvalidValue(
            "sync_delay", training.sync_delay, "cannot be expressed in the paper's form; use another solver"
        )


def _by_layer(rows: Array) -> Array:
    """The stage graph lists the last layer first."""
    return rows[::-1]


def _cut_usd(traffic: StageTraffic, setting: Setting) -> Array:
    """Dollars of the messages that a cut behind each layer costs, the same under every setting.

    The layer before the cut puts activations and gets gradients; the layer behind it does the opposite.
    """
    none = np.zeros_like(traffic.forward_out_objects)
    before = replace(traffic, forward_in_objects=none, backward_out_objects=none)
    behind = replace(traffic, forward_out_objects=none, backward_in_objects=none)
    before_usd, behind_usd = (
        _by_layer(request_usd(*message_requests(side, setting), setting.spec))[:, 0] for side in (before, behind)
    )
    usd: Array = before_usd + np.append(behind_usd[1:], 0.0)
    return usd


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


def read_chain(m: pyo.ConcreteModel, programme: ChainProgramme) -> tuple[Setting, list[StageChoice]]:
    """The setting and the stages of a solved model."""
    setting = next(programme.settings[s] for s in m.settings if pyo.value(m.chosen[s]) > 0.5)
    choices, first = [], 0
    for layer in m.layers:
        if pyo.value(m.cut[layer]) > 0.5:
            size = next(j for j in m.sizes if pyo.value(m.sized[layer, j]) > 0.5)
            choices.append(StageChoice(first, layer + 1, size, False))
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
    """The memory of a stage when its last layer is counted fits its functions (in megabytes)."""
    own_mb, received_mb = programme.activation_mb, programme.held_input_mb
    totals = {
        "parameter": float(programme.parameter_mb.sum()),
        "constant": float(programme.constant_mb.sum()),
        "activation": float((own_mb + received_mb).sum()),
        "workspace": float(programme.workspace_mb.max()),
    }

    def activation(i: int) -> Any:
        return own_mb[i] + received_mb[i] * begins(m, i)  # what a stage keeps of its input counts with its first layer

    held = {
        "parameter": accumulate(
            m, "parameter_mb", programme.parameter_mb.__getitem__, totals["parameter"], backward=False
        ),
        "constant": accumulate(m, "constant_mb", programme.constant_mb.__getitem__, totals["constant"], backward=False),
        "activation": accumulate(m, "activation_mb", activation, totals["activation"], backward=False),
        "workspace": _largest_workspace(m, programme, totals["workspace"]),
    }
    sizes_mb = np.array([size.memory_mb for size in programme.problem.spec.sizes], dtype=np.float64)

    def fit(m: Any, i: int, s: int) -> Any:
        setting = programme.settings[s]
        needs_mb = _needs_mb(setting, **{name: amounts[i] for name, amounts in held.items()})
        most_mb = _needs_mb(setting, **totals)
        return needs_mb <= of_size(m, i, sizes_mb) + most_mb * (1 - m.chosen[s])

    m.a_stage_fits_its_functions = pyo.Constraint(m.layers, m.settings, rule=fit)


def _needs_mb(setting: Setting, *, parameter: Any, constant: Any, activation: Any, workspace: Any) -> Any:
    """Megabytes that a function needs, by the cost model's own formulas; a chain has no tied parameters."""
    state_mb = state_bytes(
        copies=parameter_copies(setting),
        buffers=buffer_copies(setting),
        parameter_bytes=parameter,
        summed_bytes=parameter,
        constant_bytes=constant,
    )
    activations_mb = setting.micro_batches_each * activation + workspace
    return setting.base_bytes / MB + state_mb + activations_mb + waste_bytes(activations_mb)


def _largest_workspace(m: pyo.ConcreteModel, programme: ChainProgramme, most_mb: float) -> Any:
    """A variable for each layer: the largest workspace from the stage's first layer to it."""
    m.workspace_mb = pyo.Var(m.layers, domain=pyo.NonNegativeReals)
    m.workspace_is_the_largest_of_the_stage = pyo.ConstraintList()
    for i in m.layers:
        m.workspace_is_the_largest_of_the_stage.add(m.workspace_mb[i] >= float(programme.workspace_mb[i]))
        if i > 0:
            before_mb = m.workspace_mb[i - 1] - most_mb * begins(m, i)
            m.workspace_is_the_largest_of_the_stage.add(m.workspace_mb[i] >= before_mb)
    return m.workspace_mb


def _add_iteration(m: pyo.ConcreteModel, programme: ChainProgramme) -> None:
    """Seconds of an iteration under the chosen setting (FuncPipe, section 3.2)."""
    seconds_per_work = programme.settings[0].seconds_per_work

    def finish(m: Any, i: int, s: int) -> Any:
        setting = programme.settings[s]
        repeats, share = setting.repeats, setting.meeting_share
        finish_s = synchronised_s(
            share * m.backward_sum_s[i], m.backward_lane_s[i], m.sync_s[i], setting.meeting_repeats
        )
        finish_s += (1 - share) * m.backward_sum_s[0] + setting.local_repeats * m.backward_lane_s[0]
        unchosen_s = (repeats + 2) * programme.longest_s * (1 - m.chosen[s])
        return ended_s(m.forward_sum_s, m.forward_lane_s, finish_s, repeats) <= m.iteration_s + unchosen_s

    m.an_iteration_ends_with_the_last_synchronisation = pyo.Constraint(m.layers, m.settings, rule=finish)
    if seconds_per_work:
        work_s = pyo.quicksum(of_size(m, i, seconds_per_work * programme.work_s[i]) for i in m.layers)
        m.shared_processors_do_all_the_work = pyo.Constraint(expr=work_s <= m.iteration_s)


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
        alone = request_usd(*sync_requests(setting.way, setting.replicas), setting.spec) / unit
        alone *= setting.meeting_share
        m.money.add(messages + alone * stages <= m.requests + alone * len(m.layers) * unchosen)
    cost = dollars(m.price, m.iteration_s, m.requests)
    if goal.counts_seconds:
        m.the_budget_suffices = pyo.Constraint(expr=cost <= goal.budget_usd / unit)
        m.objective = pyo.Objective(expr=m.iteration_s)
    else:
        m.objective = pyo.Objective(expr=cost + goal.time_value_usd_s / unit * m.iteration_s)
