"""How often a stage is saved, from what steps, checkpoints and failures take.

Optimal intervals between checkpoints: J. W. Young, A first order approximation to the optimum checkpoint interval,
CACM 17(9), 1974; J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22(3),
2006, equation 37.
"""

import math
from collections import deque
from statistics import median

from funcpipe.core import FaultTolerance, checks

_REMEMBERED = 8


def daly_s(*, checkpoint_s: float, failure_interval_s: float) -> float:
    """Seconds of work between two checkpoints that lose least, where one takes `checkpoint_s`."""
    checks.positive("failure_interval_s", failure_interval_s)
    if checkpoint_s >= 2 * failure_interval_s:
        return failure_interval_s
    ratio = checkpoint_s / (2 * failure_interval_s)
    young_s = math.sqrt(2 * checkpoint_s * failure_interval_s)
    return young_s * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_s


class CheckpointInterval:
    """What a worker measures of its steps, and how often its stage should be saved for it."""

    def __init__(self, faults: FaultTolerance, *, replicas: int) -> None:
        """A stage of so many replicas fails as often as all of them together."""
        self._faults = faults
        self._failure_interval_s = faults.failure_interval_s / replicas
        self._steps_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._received: deque[int] = deque(maxlen=_REMEMBERED)
        self.checkpoint_s = 0.0

    def step_took(self, seconds: float, received_bytes: int) -> None:
        """Note a step."""
        self._steps_s.append(seconds)
        self._received.append(received_bytes)

    def checkpoint_took(self, seconds: float) -> None:
        """Note a checkpoint."""
        self.checkpoint_s = seconds

    @property
    def step_s(self) -> float:
        """What a step usually takes; 0 before the first."""
        return median(self._steps_s) if self._steps_s else 0.0

    def every(self) -> int:
        """The steps between two checkpoints: as chosen, or a power of two, so that those of all stages coincide."""
        if self._faults.checkpoint_steps is not None:
            return self._faults.checkpoint_steps
        if not self._steps_s:
            return 1
        best_s = daly_s(checkpoint_s=self.checkpoint_s, failure_interval_s=self._failure_interval_s)
        steps = min(
            best_s / max(self.step_s, 1e-6),
            self._faults.retained_bytes / max(median(self._received), 1),
            float(1 << 20),
        )
        return 1 << max(round(math.log2(max(steps, 1.0))), 0)
