"""The size of a stage that has run out of memory: the next larger one, of a function or of its accelerator."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from funcpipe.core import MB, FunctionSize, Plan, PlatformSpec
from funcpipe.errors import InputError, PlanError, WorkerFailed
from funcpipe.partitioner.cost.formulas import WASTE

LESS_MEMORY = (
    "smaller micro-batches or plan.recompute=auto need less, and so does less data in memory (funcpipe profile --data "
    "says how much it takes)"
)
"""The ways out for a stage that does not fit."""


def larger_sizes(
    sizes: Iterable[FunctionSize], functions: PlatformSpec, host_mb: int, device_mb: int | None, *, on_device: bool
) -> Mapping[FunctionSize, int]:
    """Return those of `sizes` that have more memory than `host_mb`, or on their accelerator than `device_mb`, and not
    less of the other, with that memory and in its order. `functions` says which have an accelerator.
    """
    found = []
    for size in sizes:
        device = functions.device_memory_mb(size.name)
        if (device is None) is (device_mb is None):
            grows, stays = (device or 0) - (device_mb or 0), size.memory_mb - host_mb
            grows, stays = (grows, stays) if on_device else (stays, grows)
            if grows > 0 and stays >= 0:
                found.append((grows, stays, size))
    found.sort(key=lambda one: one[:2])
    return {size: grows + ((device_mb or 0) if on_device else host_mb) for grows, _, size in found}


def grown(
    plan: Plan,
    number: int,
    peak_bytes: int,
    sizes: Mapping[FunctionSize, int],
    check: Callable[[Plan], None],
    *,
    failure: str,
) -> Plan:
    """`plan` with the first of `sizes` for stage `number` whose memory, in MB, has room for `peak_bytes`, and that
    `check` admits.

    The peak was cut off by the lack of memory, so the allocator's waste is added. Raises WorkerFailed, which begins
    with `failure`, if there is none.
    """
    stage, need_mb, refusals = plan.stages[number], math.ceil(peak_bytes * (1 + WASTE) / MB), []
    for size, memory_mb in sizes.items():
        larger = replace(stage, size=size.name, memory_mb=size.memory_mb)
        found = replace(plan, stages=(*plan.stages[:number], larger, *plan.stages[number + 1 :]))
        try:
            if memory_mb < need_mb:
                raise PlanError(f"{memory_mb} MB is less than {need_mb} MB, the peak and an eighth in reserve")
            check(found)
        except InputError as error:
            refusals.append(f"{size.name}: {error}")
        else:
            return found
    raise WorkerFailed(f"{failure}; no larger function can run there ({'; '.join(refusals)}); " + LESS_MEMORY)
