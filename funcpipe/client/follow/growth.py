"""The size that a stage gets whose functions have run out of memory."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from funcpipe.core import MB, FunctionSize, Plan
from funcpipe.errors import InputError, PlanError, WorkerFailed
from funcpipe.partitioner.cost.formulas import WASTE

LESS_MEMORY = (
    "smaller micro-batches or --recompute auto need less, and so does less data in memory (funcpipe profile --data "
    "says how much it takes)"
)
"""The ways out for a stage that does not fit."""


def grown(
    plan: Plan,
    number: int,
    peak_bytes: int,
    sizes: Sequence[FunctionSize],
    check: Callable[[Plan], None],
    *,
    failure: str,
) -> Plan:
    """`plan` with the least larger size for stage `number` that has room for `peak_bytes` and that `check` admits.

    The peak was cut off by the lack of memory, so the allocator's waste is added. Raises WorkerFailed, which begins
    with `failure`, if there is none.
    """
    stage, need_mb, refusals = plan.stages[number], math.ceil(peak_bytes * (1 + WASTE) / MB), []
    for size in sorted(sizes, key=lambda size: size.memory_mb):
        if size.memory_mb <= stage.memory_mb:
            continue
        larger = replace(stage, size=size.name, memory_mb=size.memory_mb)
        found = replace(plan, stages=(*plan.stages[:number], larger, *plan.stages[number + 1 :]))
        try:
            if size.memory_mb < need_mb:
                raise PlanError(f"{size.memory_mb} MB is less than {need_mb} MB, the peak and an eighth in reserve")
            check(found)
        except InputError as error:
            refusals.append(f"{size.name}: {error}")
        else:
            return found
    raise WorkerFailed(f"{failure}; no larger function can run there ({'; '.join(refusals)}); " + LESS_MEMORY)
