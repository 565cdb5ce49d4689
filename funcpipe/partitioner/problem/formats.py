"""Which number formats a plan travels in where the user leaves that to the planner (`Numerics`).

bf16 halves bytes, and neither requests nor computation grow: every plan takes as long, as many dollars and as much
memory as in 32 bits, or less. So no search is needed to see that bf16 is best, under every goal. What never travels, as
between the stages of a plan that has but one, gains nothing, and stays as it is.

int8 takes about half as many bytes as bf16 again. For messages between stages the same holds as for bf16, so where it
is allowed they travel in int8; a model that computes in 16 bits makes most of them in 16 bits, which no format rounds
further, and keeps bf16. For sums functions keep what rounding takes away, which may need larger ones, or leave no plan
at all. So where sums in int8 are allowed, a plan is made for each of the two formats, and the better one is taken. The
updated parameters of a divided optimiser travel in 32 bits in any case.
"""

from collections.abc import Callable
from dataclasses import replace

from funcpipe.core import Numerics, Optimality, Plan, Precision, TrainingSpec, Wire
from funcpipe.errors import Infeasible
from funcpipe.partitioner.problem.report import GAP_OF_A_PROOF

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


def may_sum_in_8_bits(training: TrainingSpec, precision: Precision) -> bool:
    """Whether a plan with sums in 8 bits is to be compared: it is allowed, nothing else was asked for, no loss is
    scaled.
    """
    scales = precision.scales_loss or Wire.FP16 in (training.wire, training.wire_back)
    return training.numerics is Numerics.INT8 and training.wire_sync is Wire.FP32 and not scales


def better_of(find: Callable[[Wire], Plan]) -> Plan:
    """The better of the plans that `find` makes for sums in bf16 and in int8, where there is one."""
    plan = find(Wire.BF16)
    try:
        other = find(Wire.INT8)
    except Infeasible:
        return plan
    if plan.solver is None or other.solver is None:
        return plan
    best, rest = (plan, other) if plan.solver.objective <= other.solver.objective else (other, plan)
    return with_bound_of(best, rest)


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
