"""The end of a run because of its limits of cost and time, as one of its workers finds by itself.

The order to end names a step that all workers read in time. Where steps become so slow that it would come too late,
or all wait for one worker, as in a hand-over, the run ends at once: a little before the limit, so that each worker can
still end the step that it is in, and save its stage.
"""

from dataclasses import dataclass

from funcpipe.core import Halt
from funcpipe.worker.checkpoint_interval import CheckpointInterval
from funcpipe.worker.checkpoint_manager import CheckpointManager
from funcpipe.worker.halt_orders import HaltOrders
from funcpipe.worker.hand_over import Successor
from funcpipe.worker.progress import WorkerProgress
from funcpipe.worker.validation import Validator


@dataclass(frozen=True, kw_only=True, eq=False)
class LimitCheck:
    """One worker's check of the run's limits, by the parts that it works with."""

    progress: WorkerProgress
    interval: CheckpointInterval
    checkpoints: CheckpointManager
    orders: HaltOrders
    successor: Successor
    validator: Validator | None
    heartbeat_s: float

    def after_step(self) -> None:
        """Order the run to end before it would exceed a limit; at once if steps have become too slow for that."""
        budget, progress = self.progress.budget, self.progress
        if not budget.is_limited or self.behind_steps:  # or would order what others have passed
            return
        if progress.done < progress.steps and (reason := self.exceeded()) is not None:
            self.orders.give(Halt(reason=reason))
            return
        step_s, end_s = self.interval.step_s, self._end_s
        notice_s = budget.notice_steps(step_s) * step_s
        costs = self.successor.costs_within(notice_s + end_s, step_s=step_s, saving_s=self.interval.checkpoint_s)
        halt = budget.halt_before_exceeding(
            step=progress.done,
            steps=progress.steps,
            age_s=progress.billed_s,
            step_s=step_s,
            end_s=end_s + costs.pause_s,
            beside_s=costs.beside_s,
        )
        if halt is not None:
            self.orders.give(halt)

    def exceeded(self, *, ahead_s: float = 0.0) -> str | None:
        """Return the limit that is exceeded, `ahead_s` from now, if the run does not end at once."""
        return self.progress.budget.exceeded(self.progress.billed_s, ahead_s=self._end_s + ahead_s)

    def grace_s(self) -> float:
        """For how long a worker that is to end at once may go on: for the step that it is in, if that is for a limit.

        That is twice as long as any step lasted, and as long as those that it has yet to do again.
        """
        return self._ending_s if self.is_near() else 0.0

    def is_near(self) -> bool:
        """Return True if a limit is reached within two heartbeats: others have reached it before."""
        return self.exceeded(ahead_s=2 * self.heartbeat_s) is not None

    @property
    def behind_steps(self) -> int:
        """The number of steps that this worker has yet to do again, and others have done."""
        return max(self.checkpoints.repeated_until - self.progress.done, 0)

    @property
    def _ending_s(self) -> float:
        return (2 + self.behind_steps) * self.interval.longest_step_s + self.heartbeat_s / 4

    @property
    def _end_s(self) -> float:
        """The time to end at once: to end a step, to validate if that is due, and to save the stage."""
        validation_s = 0.0 if self.validator is None else self.validator.took_s
        return self._ending_s + validation_s + self.interval.checkpoint_s
