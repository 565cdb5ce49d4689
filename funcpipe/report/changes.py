"""Possible changes of a plan, each priced by the cost model."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from funcpipe.core import SYNC_WIRES, ModelProfile, Plan, PlatformSpec, ScheduleKind, Sync, Wire
from funcpipe.errors import InvalidValue, PlanError
from funcpipe.partitioner.cost.evaluate import check_memory, evaluate


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of a plan, all else as it is; by how much an iteration's seconds and dollars would grow."""

    what: str
    more_s: float
    more_usd: float
    numerics: bool = False

    @property
    def is_better(self) -> bool:
        """True if it saves time or money, by more than rounding."""
        return self.more_s < -1e-9 or self.more_usd < -1e-12


def changes(plan: Plan, profile: ModelProfile, spec: PlatformSpec) -> tuple[Change, ...]:
    """Every single change that fits into memory and saves time or money, those first that save both, then by seconds.

    Tried are: each stage on another size, or recomputing or not, the other schedules, ways of synchronising, and
    formats of fewer bits. Raises PlanError if the arguments do not belong together.
    """
    now = evaluate(plan, profile, spec)
    found = []
    for what, other in _neighbours(plan, profile, spec):
        try:
            estimate = evaluate(other, profile, spec)
            check_memory(other, estimate)
        except PlanError:
            continue  # it does not fit, so it is no change to propose
        found.append(
            Change(
                what=what,
                more_s=estimate.iteration_s - now.iteration_s,
                more_usd=estimate.cost_usd - now.cost_usd,
                numerics=other.wires != plan.wires,
            )
        )
    better = [change for change in found if change.is_better]
    return tuple(sorted(better, key=lambda c: (c.more_s > 0 or c.more_usd > 0, c.more_s)))


def _neighbours(plan: Plan, profile: ModelProfile, spec: PlatformSpec) -> Iterator[tuple[str, Plan]]:
    for number, stage in enumerate(plan.stages):
        others = [replace(stage, recompute=not stage.recompute)]
        others += [
            replace(stage, size=size.name, memory_mb=size.memory_mb)
            for size in spec.sizes
            if size.name in profile.sizes and size.name != stage.size
        ]
        for other in others:
            how = "recomputes" if other.recompute else "keeps its activations"
            what = f"stage {number} on {other.size}" if other.size != stage.size else f"stage {number} {how}"
            yield what, replace(plan, stages=(*plan.stages[:number], other, *plan.stages[number + 1 :]))
    for schedule in set(ScheduleKind) - {plan.schedule}:
        yield f"schedule {schedule.value}", replace(plan, schedule=schedule)
    yield from _other_sums(plan)
    for wire in (Wire.BF16, Wire.INT8) if len(plan.stages) > 1 else ():
        if wire.ratio < plan.wire.ratio:
            yield f"activations in {wire.value}", replace(plan, wire=wire)


def _other_sums(plan: Plan) -> Iterator[tuple[str, Plan]]:
    if plan.replicas == 1:
        return
    for sync in Sync:
        if sync is not plan.sync:
            try:
                other = replace(plan, sync=sync, streams=None)
            except InvalidValue:
                continue  # with an optimiser that is divided, not every way can be taken
            yield f"synchronisation {sync.value}", other
    for wire in SYNC_WIRES:
        if wire is not plan.wire_sync:
            yield f"sums in {wire.value}", replace(plan, wire_sync=wire)
