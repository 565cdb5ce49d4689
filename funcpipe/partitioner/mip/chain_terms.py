"""Terms that the rows of the paper's form of a chain are made of."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyomo.environ as pyo

from funcpipe.partitioner.cost import Array


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
    """A variable for each layer that is at least `row` of its size where `holds` is 1; zeros if the row has nothing."""
    if not row.any():
        return np.zeros(len(row))
    seconds = pyo.Var(m.layers, domain=pyo.NonNegativeReals)
    setattr(m, name, seconds)

    def at_least(m: Any, i: int) -> Any:
        return seconds[i] >= of_size(m, i, row[i]) - float(row[i].max()) * (1 - holds(i))

    setattr(m, f"{name}_is_taken_at_a_cut", pyo.Constraint(m.layers, rule=at_least))
    return seconds
