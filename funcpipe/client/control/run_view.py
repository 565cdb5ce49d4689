"""A watcher's view of a run at one poll: its status, and what follows from several polls."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from funcpipe.client.control.run_status import RunStatus
from funcpipe.client.control.verdict import Verdict
from funcpipe.core import MB, Plan, RequestCounts
from funcpipe.runstate.liveness import WorkerState

_NEARLY_FULL = 0.95
_MUCH_SLOWER = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Succession:
    """A function that was started as another `attempt` of a worker, and `reason`: why."""

    worker: str
    attempt: int
    started_at_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoss:
    """The mean loss over the samples of a step, which is counted from 0."""

    step: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run at one poll, at `looked_at_s` of this machine's clock.

    `done` steps are reported, a few more than in heartbeats. `losses` are the newest that are known, those of some
    steps may be missing; `first_loss` is the oldest. A step takes `step_s`, and the rest of the run `left_s`; the run
    will have cost `expected_usd` if the rest costs per second what it has cost so far. The plan expected `planned_s`
    for a step and `planned_usd` for all of them. `lane_shares` holds, for each worker, the share of its `beats` (those
    that this watcher has seen) in which a lane had a task, waits for messages included. `asked` are the requests to
    the storage of this poll.
    """

    FORMAT: ClassVar[str] = "funcpipe.run-view/1"

    looked_at_s: float
    platform: str
    status: RunStatus
    done: int
    losses: tuple[StepLoss, ...] = ()
    first_loss: StepLoss | None = None
    skipped: int = 0
    step_s: float | None = None
    left_s: float | None = None
    expected_usd: float | None = None
    planned_s: float | None = None
    planned_usd: float | None = None
    beats: Mapping[str, int] = field(default_factory=dict)
    lane_shares: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    successions: tuple[Succession, ...] = ()
    warnings: tuple[str, ...] = ()
    asked: RequestCounts = field(default_factory=RequestCounts)

    @property
    def has_ended(self) -> bool:
        """True if nothing of the run goes on, nor will by itself; a watchdog may restart a dead run."""
        return self.status.verdict in (Verdict.FINISHED, Verdict.STOPPED, Verdict.FAILED)


def planned(plan: Plan, steps: int) -> tuple[float | None, float | None]:
    """Seconds of one step, and dollars of so many, as the plan expected them; None where it has no estimate."""
    if plan.estimate is None:
        return None, None
    return plan.estimate.iteration_s, steps * plan.estimate.cost_usd


def warnings_of(status: RunStatus, *, skipped: int, step_s: float | None, planned_s: float | None) -> tuple[str, ...]:
    """The problems to investigate, the worst first."""
    found = []
    if status.verdict in (Verdict.WAITING, Verdict.DEAD):
        found.append(f"{status.verdict.value}: {status.explanation}")
    if status.halt is not None and status.verdict is not Verdict.FAILED:
        found.append(f"ends early: {status.halt}")
    for worker in status.workers:
        if worker.state in (WorkerState.SILENT, WorkerState.DEAD, WorkerState.FAILED):
            found.append(f"{worker.worker} is {worker.state.value}" + (f": {worker.error}" if worker.error else ""))
        elif worker.memory_bytes > _NEARLY_FULL * worker.memory_mb * MB:
            share = worker.memory_bytes / (worker.memory_mb * MB)
            found.append(f"{worker.worker} has used {share:.0%} of its memory: train with --on-oom grow, or plan anew")
    if skipped:
        whose = "step updated nothing, as its" if skipped == 1 else "steps updated nothing, as their"
        found.append(f"{skipped} {whose} gradients were not finite")
    if step_s is not None and planned_s and step_s > _MUCH_SLOWER * planned_s:
        found.append(f"a step takes {step_s:.3g} s, {step_s / planned_s:.1f} times what the plan expected")
    return tuple(found)
