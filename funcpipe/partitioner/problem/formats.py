"""Which number formats a plan travels in where the user leaves that to the planner (`Numerics.BF16`).

bf16 halves bytes, and neither requests nor computation grow: every plan takes as long, as many dollars and as much
memory as in 32 bits, or less. So no search is needed to see that bf16 is best, under every goal. What never travels, as
between the stages of a plan that has but one, gains nothing, and stays as it is.
"""

from dataclasses import replace

from funcpipe.core import Numerics, Plan, TrainingSpec, Wire

REASON = "bf16 halves what travels, and numerics=bf16 allows it"


def with_formats(training: TrainingSpec) -> TrainingSpec:
    """`training` with the best of the formats that it allows."""
    if training.numerics is Numerics.EXACT:
        return training
    back = None if training.wire_back is None else _smaller(training.wire_back)
    return replace(training, wire=_smaller(training.wire), wire_back=back, wire_sync=Wire.BF16)


def without_idle_formats(plan: Plan, training: TrainingSpec) -> Plan:
    """`plan`, which was made for `training`, with bf16 only where something travels in it."""
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
    return None if same else REASON


def _smaller(wire: Wire) -> Wire:
    return Wire.BF16 if wire is Wire.FP32 else wire
