"""Seconds along a chain of layers in the paper's variables: what accumulates in a stage and starts again at a cut.

By hand, `accumulate` for three layers of 1 s each with a cut behind the first: the variables are at least 1, 1 and 2 s,
since x₁ >= 1 + x₀ − total · cut₀ does not bind, while x₂ >= 1 + x₁ does. Minimised, they are exactly that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyomo.environ as pyo

from funcpipe.core import MB
from funcpipe.partitioner.cost.arrays import Array
from funcpipe.partitioner.cost.formulas import Lanes
from funcpipe.partitioner.cost.loads import Setting
from funcpipe.partitioner.cost.sync_time import sync_time_s
from funcpipe.partitioner.problem.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainProgramme:
    """What the model is built from, as if each layer were a stage of its own.

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


def begins(m: Any, layer: int) -> Any:
    """1 where a stage begins with the layer."""
    return m.cut[layer - 1] if layer > 0 else 1


def of_size(m: Any, layer: int, row: Array) -> Any:
    """The element of `row` for the size of the layer."""
    return pyo.quicksum(float(row[j]) * m.sized[layer, j] for j in m.sizes)


def accumulate(m: pyo.ConcreteModel, name: str, amount: Callable[[int], Any], total: Any, *, backward: bool) -> Any:
    """A variable for each layer: the sum of `amount` from the stage's first layer to it (or from it to the last)."""
    sums = pyo.Var(m.layers, domain=pyo.NonNegativeReals)
    setattr(m, name, sums)

    def add(m: Any, i: int) -> Any:
        before, apart = (i + 1, m.cut[i]) if backward else (i - 1, begins(m, i))
        if before not in m.layers:
            return pyo.Constraint.Skip
        return sums[i] >= amount(i) + sums[before] - float(total) * apart

    def begin(m: Any, i: int) -> Any:
        return sums[i] >= amount(i)

    setattr(m, f"{name}_adds_up_in_a_stage", pyo.Constraint(m.layers, rule=add))
    setattr(m, f"{name}_counts_its_own_layer", pyo.Constraint(m.layers, rule=begin))
    return sums


def where_cut(m: pyo.ConcreteModel, name: str, row: Array, holds: Callable[[int], Any]) -> Any:
    """A variable for each layer that is at least `row` of its size where `holds` is 1."""
    seconds = pyo.Var(m.layers, domain=pyo.NonNegativeReals)
    setattr(m, name, seconds)

    def at_least(m: Any, i: int) -> Any:
        return seconds[i] >= of_size(m, i, row[i]) - float(row[i].max()) * (1 - holds(i))

    setattr(m, f"{name}_is_taken_at_a_cut", pyo.Constraint(m.layers, rule=at_least))
    return seconds


def add_forward(m: pyo.ConcreteModel, programme: ChainProgramme) -> None:
    """The slowest lane of all stages forward, and the sum of all lanes."""
    lanes, most = programme.lanes, programme.longest_s
    compute = accumulate(m, "forward_s", lambda i: of_size(m, i, lanes.forward_s[i]), most, backward=False)
    upload = where_cut(m, "forward_upload_s", lanes.forward_upload_s, lambda i: m.cut[i])
    download = where_cut(m, "forward_download_s", lanes.forward_download_s, lambda i: begins(m, i))
    m.forward_lane_s = pyo.Var(domain=pyo.NonNegativeReals)
    m.lanes_forward = pyo.ConstraintList()
    for i in m.layers:
        for lane in (compute, upload, download):
            m.lanes_forward.add(lane[i] <= m.forward_lane_s)
    m.forward_sum_s = pyo.Expression(
        expr=pyo.quicksum(of_size(m, i, lanes.forward_s[i]) + upload[i] + download[i] for i in m.layers)
    )


def add_backward(m: pyo.ConcreteModel, programme: ChainProgramme) -> None:
    """Lanes and sums of the layers from each one on, and the synchronisation of the stage that begins with it."""
    lanes, most = programme.lanes, programme.longest_s
    compute = accumulate(m, "backward_s", lambda i: of_size(m, i, lanes.backward_s[i]), most, backward=True)
    upload = where_cut(m, "backward_upload_s", lanes.backward_upload_s, lambda i: begins(m, i))
    download = where_cut(m, "backward_download_s", lanes.backward_download_s, lambda i: m.cut[i])
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
            of_size(m, k, lanes.backward_s[k]) + upload[k] + download[k] for k in m.layers if k >= i
        ),
    )
    _add_sync(m, programme)


def _add_sync(m: pyo.ConcreteModel, programme: ChainProgramme) -> None:
    """Seconds linear in the parameters of the stage, with a slope for each setting and size."""
    parameter_mb = programme.parameter_mb
    owed = accumulate(m, "owed_mb", parameter_mb.__getitem__, parameter_mb.sum(), backward=True)
    m.sync_s = pyo.Var(m.layers, domain=pyo.NonNegativeReals)

    def last(m: Any, i: int, s: int, j: int) -> Any:
        fixed_s = _sync_s(programme, s, j, 0.0)
        slope_s = _sync_s(programme, s, j, 1.0) - fixed_s
        most_s = _sync_s(programme, s, j, float(parameter_mb.sum()))
        return m.sync_s[i] >= fixed_s + slope_s * owed[i] - most_s * (2 - m.chosen[s] - m.sized[i, j])

    m.synchronisation_takes_its_time = pyo.Constraint(m.layers, m.settings, m.sizes, rule=last)


def _sync_s(programme: ChainProgramme, s: int, j: int, gradient_mb: float) -> float:
    """Seconds in which replicas on size j synchronise `gradient_mb` under setting s."""
    setting, size = programme.settings[s], programme.problem.spec.sizes[j]
    seconds = sync_time_s(
        setting.way.sync,
        gradient_bytes=setting.sync_wire_ratio * gradient_mb * MB,
        merged_bytes=setting.merged_wire_ratio * gradient_mb * MB,
        replicas=setting.replicas,
        upload_bytes_s=size.upload_bytes_s,
        download_bytes_s=size.download_bytes_s,
        latency_s=setting.spec.latency_s,
    )
    return float(seconds)
