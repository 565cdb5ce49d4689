"""The interval of a stage's checkpoints, from measured times of steps and checkpoints and the assumed rate of failures.

Optimal interval: J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974; J. T.
Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22(3), 2006, equation 37.

Where failures are rare, that interval is so long that messages, which stay until a checkpoint covers them, pile up in
the storage. So it is shortened to what `retained_bytes` and `retained_objects` allow. The number of objects is a matter
of order, not of correctness: for it checkpoints may take `COST_SHARE` of the time, and no more. All that comes with a
checkpoint counts, in each worker: the seconds for which its steps stop, as for the write, and the processor time of
what is done beside them: reading back, marks, looking for those of others, deletions. Requests that are waited for
beside the steps cost nothing.
"""

import logging
import math
import threading
from collections import deque
from statistics import median, median_low

from funcpipe.core import FaultTolerance, checks

_log = logging.getLogger(__name__)

_MEASURED_STEPS = 8
_MEASURED_CHECKPOINTS = 5
_MAX_STEPS = 1 << 20
_SHORTEST_STEP_S = 1e-6

COST_SHARE = 0.02
"""The share of time that checkpoints may take to keep the number of objects small."""

LATE_STEPS = 4
"""The steps after a checkpoint is due by which readers have saved theirs, and its messages are deleted."""


def daly_s(*, checkpoint_s: float, failure_interval_s: float) -> float:
    """Return seconds of work between two checkpoints that lose the least time, if a checkpoint takes `checkpoint_s`."""
    checks.positive("failure_interval_s", failure_interval_s)
    if checkpoint_s >= 2 * failure_interval_s:
        return failure_interval_s
    ratio = checkpoint_s / (2 * failure_interval_s)
    young_s = math.sqrt(2 * checkpoint_s * failure_interval_s)
    return young_s * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_s


class CheckpointInterval:
    """Measures a worker's steps and checkpoints, and chooses the interval of its stage's checkpoints."""

    def __init__(self, faults: FaultTolerance, *, replicas: int) -> None:
        """A stage of several `replicas` fails as often as all of them together."""
        self._faults = faults
        self._failure_interval_s = faults.failure_interval_s / replicas
        self._steps_s: deque[float] = deque(maxlen=_MEASURED_STEPS)
        self._received_bytes: deque[int] = deque(maxlen=_MEASURED_STEPS)
        self._costs_s: deque[float] = deque(maxlen=_MEASURED_CHECKPOINTS)
        self._lock = threading.Lock()  # costs are recorded in the background too
        self._objects = 0
        self._last_steps = 0
        self.checkpoint_s = 0.0

    def record_step(self, seconds: float, received_bytes: int, objects: int = 0) -> None:
        """Record the time of a step, the bytes of the messages that it received, and what it left.

        `objects` is the number of messages that any worker puts in such a step, at most.
        """
        self._steps_s.append(seconds)
        self._received_bytes.append(received_bytes)
        self._objects = objects

    def estimate_checkpoint(self, seconds: float) -> None:
        """Set the time that a checkpoint may take, as long as this worker has written none."""
        self.checkpoint_s = seconds

    def record_checkpoint(self, seconds: float) -> None:
        """Record the time in which a checkpoint was written."""
        self.checkpoint_s = seconds

    def begin_checkpoint(self) -> None:
        """From now on, costs are those of another checkpoint."""
        with self._lock:
            self._costs_s.append(0.0)

    def record_cost(self, seconds: float) -> None:
        """Record what this worker has spent on the checkpoint that began last; before the first, it does not count."""
        with self._lock:
            if self._costs_s:
                self._costs_s[-1] += seconds

    @property
    def step_s(self) -> float:
        """The median time of the last steps; 0 before the first."""
        return median(self._steps_s) if self._steps_s else 0.0

    @property
    def longest_step_s(self) -> float:
        """The longest time of the last steps; 0 before the first."""
        return max(self._steps_s, default=0.0)

    def steps(self) -> int:
        """The number of steps between two checkpoints: the user's, or a power of two, so that stages coincide."""
        if self._faults.checkpoint_steps is not None:
            return self._faults.checkpoint_steps
        if not self._steps_s:
            return 1
        best_s = daly_s(checkpoint_s=self.checkpoint_s, failure_interval_s=self._failure_interval_s)
        by_time = best_s / max(self.step_s, _SHORTEST_STEP_S)
        by_bytes = self._faults.retained_bytes / max(median(self._received_bytes), 1)
        wanted = 1 << max(round(math.log2(max(min(by_time, by_bytes, _MAX_STEPS), 1.0))), 0)
        steps = min(wanted, self._steps_for_objects())
        if steps != self._last_steps:
            _log.debug("checkpoints every %d steps, for steps of %.3f s", steps, self.step_s)
            self._last_steps = steps
        return steps

    def _steps_for_objects(self) -> int:
        """The power of two at which so few objects are kept, unless more steps are needed to pay for a checkpoint.

        Until this worker has measured two checkpoints, as the first one may be slow, the objects alone count.
        """
        allowed = self._faults.retained_objects / max(self._objects, 1) - LATE_STEPS
        few = 1 << math.floor(math.log2(min(max(allowed, 1.0), _MAX_STEPS)))
        with self._lock:
            costs_s = tuple(self._costs_s)
        if len(costs_s) < 2:
            return few
        paid = median_low(costs_s) / (COST_SHARE * max(self.step_s, _SHORTEST_STEP_S))
        return max(few, 1 << math.ceil(math.log2(min(max(paid, 1.0), _MAX_STEPS))))
