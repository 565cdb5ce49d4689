"""The wishes for a plan: what makes it good, in which number formats it may travel, and whether it only evaluates.

A goal is dollars, with time being worth something, or seconds, within limits.

Formats are left to the planner where the user says so (`Numerics`). bf16 halves bytes, requests stay as they are, and a
cast takes the processor less time than any link saves by it (`cost/rounding.py`): every plan takes as long, as many
dollars and as much memory as in 32 bits, or less. So no search is needed to see that bf16 is best, under every goal.
What never travels, as between the stages of a plan that has but one, gains nothing, and stays as it is. int8 takes
about half as many bytes as bf16 again. For messages between stages the same holds as for bf16, so where it is allowed
they travel in int8; a model that computes in 16 bits makes most of them in 16 bits, which no format rounds further, and
keeps bf16. For sums functions keep what rounding takes away, which may need larger ones, or leave no plan at all. So
where sums in int8 are allowed, a plan is made for each of the two formats, and the better one is taken. The updated
parameters of a divided optimiser travel in 32 bits in any case.

A model that is only evaluated has forwards alone, and keeps nothing for a backward. Its parameters are constants: they
have no gradients, no values of an optimiser, and nothing of them is summed over replicas or stages. Activations live
only while their layer runs, so that more micro-batches fit at once.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from funcpipe.core import (
    LayerProfile,
    ModelProfile,
    Numerics,
    Optimality,
    Plan,
    PlatformSpec,
    Precision,
    TensorProfile,
    TrainingSpec,
    Wire,
)
from funcpipe.core.rounds import AUTO
from funcpipe.errors import Infeasible
from funcpipe.partitioner.cost import Array

LIMIT_SLACK = 1e-9
"""The share by which seconds and dollars may exceed their limits, which allows for rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A preference for plans: fewer dollars, time being worth something, within the deadline.

    With a budget: fewer seconds, among the plans that stay within it.
    """

    time_value_usd_s: float = 0.0
    deadline_s: float = math.inf
    budget_usd: float = math.inf
    counts_seconds: bool = False

    def objective(self, iteration_s: Array, cost_usd: Array) -> Array:
        """The value to minimise: dollars, or seconds under a budget; infinite where a limit is broken."""
        slack = 1 + LIMIT_SLACK
        allowed = (iteration_s <= self.deadline_s * slack) & (cost_usd <= self.budget_usd * slack)
        value = iteration_s if self.counts_seconds else cost_usd + self.time_value_usd_s * iteration_s
        return np.where(allowed, value, np.inf)

    def of_plan(self, plan: Plan) -> float:
        """The objective of a plan that has an estimate."""
        assert plan.estimate is not None
        return float(self.objective(np.array(plan.estimate.iteration_s), np.array(plan.estimate.cost_usd)))


def goal_of(training: TrainingSpec, spec: PlatformSpec) -> Goal:
    """The goal that `training` asks for.

    An iteration must fit into a function's life. Where nothing costs anything, the fastest plan is best.
    """
    prices = (spec.price_put_usd, spec.price_get_usd, *(size.price_usd_s for size in spec.sizes))
    free = not any(prices) and training.time_value == 0
    life_s = math.inf if spec.lifetime_s is None else spec.lifetime_s - spec.cold_start_s
    return Goal(
        time_value_usd_s=(1.0 if free else training.time_value) / 3600,
        deadline_s=min(life_s, math.inf if training.deadline_s is None else training.deadline_s),
        budget_usd=math.inf if training.budget_usd is None else training.budget_usd,
        counts_seconds=training.budget_usd is not None,
    )


GAP_OF_A_PROOF = 1e-6
"""A plan is called optimal if its objective is proved to be within this share of the best possible one."""


REASON = "bf16 halves what travels, and numerics=bf16 allows it"
REASON_8_BITS = "numerics=int8 allows 8 bits, and the best plan sends {} in them"
REASON_16_BITS = "numerics=int8 allows bf16, which makes the best plan"


def with_formats(training: TrainingSpec, precision: Precision = Precision.FP32) -> TrainingSpec:
    """`training`, of a model that computes in `precision`, with the best of the formats that it allows."""
    if training.numerics is Numerics.EXACT:
        return training
    small = Wire.INT8 if training.numerics is Numerics.INT8 and precision is Precision.FP32 else Wire.BF16

    def chosen(wire: Wire, free: Wire) -> Wire:
        return free if wire is Wire.FP32 else wire

    return replace(
        training,
        wire=chosen(training.wire, small),
        wire_back=None if training.wire_back is None else chosen(training.wire_back, small),
        wire_sync=chosen(training.wire_sync, Wire.BF16),
    )


def meeting_every(training: TrainingSpec, sync_every: int | str) -> TrainingSpec:
    """`training` with meetings after so many steps."""
    unused = {"outer_lr": 1.0, "outer_momentum": 0.0, "sync_fragments": 1, "sync_delay": 0} if sync_every == 1 else {}
    return replace(training, sync_every=sync_every, sync_every_at_most=None, **unused)  # type: ignore[arg-type]


def can_meet_every(training: TrainingSpec, steps: int) -> bool:
    """Return True if fragments, if there are several, can meet one after the other in rounds of so many steps."""
    fragments = training.sync_fragments
    return steps == 1 or (fragments <= steps and training.sync_delay * fragments < steps)


def better_round(training: TrainingSpec, find: Callable[[TrainingSpec], Plan]) -> Plan:
    """The plan that `find` makes for `training`; the best of those with at most so many steps between meetings, if it
    leaves that open.

    The more steps, the less each takes and costs, in the same memory. So the most steps are best of all, unless the
    memory of meetings leaves room for no plan, or none that is better than the best one that sums in every step; of
    equally good ones that is taken.
    """
    if training.sync_every != AUTO:
        return find(training)
    assert training.sync_every_at_most is not None
    return _better([meeting_every(training, steps) for steps in dict.fromkeys((1, training.sync_every_at_most))], find)


def may_sum_in_8_bits(training: TrainingSpec, precision: Precision) -> bool:
    """Return whether to compare a plan with sums in 8 bits: allowed, nothing else asked for, no loss scaled."""
    scales = precision.scales_loss or Wire.FP16 in (training.wire, training.wire_back)
    return training.numerics is Numerics.INT8 and training.wire_sync is Wire.FP32 and not scales


def better_format(training: TrainingSpec, find: Callable[[TrainingSpec], Plan]) -> Plan:
    """The better of the plans that `find` makes for sums in bf16 and in int8, where there is one."""
    return _better([replace(training, wire_sync=wire) for wire in (Wire.BF16, Wire.INT8)], find)


def _better(wanted: Sequence[TrainingSpec], find: Callable[[TrainingSpec], Plan]) -> Plan:
    """The best of the plans that `find` makes, the first of equally good ones; raises its last Infeasible if none."""
    plans = []
    for number, training in enumerate(wanted, start=1):
        try:
            plans.append(find(training))
        except Infeasible:
            if number == len(wanted) and not plans:
                raise
    best = plans[0]
    for plan in plans[1:]:
        if best.solver is None or plan.solver is None:
            return best
        better, rest = (best, plan) if best.solver.objective <= plan.solver.objective else (plan, best)
        best = with_bound_of(better, rest)
    return best


def with_bound_of(best: Plan, rest: Plan) -> Plan:
    """`best`, whose report counts what is proved of plans in the other format as well."""
    assert best.solver is not None
    assert rest.solver is not None
    if best.solver.bound is None or rest.solver.bound is None:
        return replace(best, solver=replace(best.solver, status=Optimality.FEASIBLE, bound=None, gap=None))
    if rest.solver.bound >= best.solver.bound:
        return best
    bound, objective = rest.solver.bound, best.solver.objective
    gap = (objective - bound) / objective if objective > bound else 0.0
    status = Optimality.OPTIMAL if gap <= GAP_OF_A_PROOF else Optimality.FEASIBLE
    return replace(best, solver=replace(best.solver, status=status, bound=bound, gap=gap))


def without_idle_formats(plan: Plan, training: TrainingSpec) -> Plan:
    """`plan`, which was made for `training`, with other formats only where something travels in them."""
    if training.numerics is Numerics.EXACT:
        return plan
    if len(plan.stages) == 1:
        plan = replace(plan, wire=training.wire, wire_back=training.wire_back)
    return replace(plan, wire_sync=training.wire_sync) if plan.replicas == 1 else plan


def reason_for(plan: Plan) -> str | None:
    """Why the planner chose the formats of `plan`; None if it did not."""
    asked = plan.made_for
    if asked is None or asked.numerics is Numerics.EXACT:
        return None
    same = (plan.wire, plan.wire_back, plan.wire_sync) == (asked.wire, asked.wire_back, asked.wire_sync)
    if same:
        return None
    if asked.numerics is Numerics.BF16:
        return REASON
    choices = {
        "activations": (plan.wire, asked.wire),
        "their gradients": (plan.gradient_wire, asked.wire_back or asked.wire),
        "sums": (plan.wire_sync, asked.wire_sync),
    }
    in_8_bits = [what for what, (wire, before) in choices.items() if wire is Wire.INT8 is not before]
    return REASON_8_BITS.format(_in_words(in_8_bits)) if in_8_bits else REASON_16_BITS


def _in_words(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def forward_only(profile: ModelProfile) -> ModelProfile:
    """`profile` without its backward."""
    return replace(
        profile,
        layers=tuple(_layer(layer) for layer in profile.layers),
        tensors=tuple(_tensor(tensor) for tensor in profile.tensors),
        ties=(),
    )


def _layer(layer: LayerProfile) -> LayerProfile:
    return replace(
        layer,
        parameter_bytes=0,
        constant_bytes=layer.constant_bytes + layer.parameter_bytes,
        activation_bytes=0,
        device_activation_bytes=None,
        workspace_bytes=max(layer.workspace_bytes, layer.activation_bytes),
        backward_s=(0.0,) * len(layer.backward_s),
        backward_spread=0.0,
        backward_work=None,
    )


def _tensor(tensor: TensorProfile) -> TensorProfile:
    return replace(tensor, backward_bytes=0, saved_by=())
