"""What users set about a run: how it copes with failures, and what it may cost."""

from dataclasses import dataclass
from enum import Enum

from funcpipe.core import checks


class OnOutOfMemory(Enum):
    """What to do when a function runs out of memory: end the run, or restart the stage in larger functions."""

    FAIL = "fail"
    GROW = "grow"


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultTolerance:
    """When workers save their state, when they count as lost, and what stays in storage after a failure.

    Each stage is checkpointed every `checkpoint_steps` steps. If that is None, the interval follows from measured
    times, for one failure of a function every `failure_interval_s`, and so that at most `retained_bytes` of messages
    are kept for one worker to read again.

    A function hands over to a successor before it is `lifetime_s` old. It is expected to start within `cold_start_s`,
    and counts as lost if nothing was heard of it for another `start_s`. It sends a heartbeat every `heartbeat_s`.
    A lease that was checked within the last `lease_s` is not checked again before a write.

    `on_oom` says what happens when a function runs out of memory. A run that fails is deleted from storage, unless
    `keep` is set; what is kept can be resumed.
    """

    checkpoint_steps: int | None = None
    failure_interval_s: float = 86_400.0
    retained_bytes: int = 8 << 30
    lifetime_s: float | None = None
    cold_start_s: float = 0.0
    start_s: float = 60.0
    heartbeat_s: float = 10.0
    lease_s: float = 10.0
    on_oom: OnOutOfMemory = OnOutOfMemory.FAIL
    keep: bool = False

    def __post_init__(self) -> None:
        for name in ("checkpoint_steps", "lifetime_s"):
            if getattr(self, name) is not None:
                checks.positive(name, getattr(self, name))
        for name in ("failure_interval_s", "retained_bytes", "start_s", "heartbeat_s", "lease_s"):
            checks.positive(name, getattr(self, name))
        checks.at_least("cold_start_s", self.cold_start_s, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """A run ends, and can be resumed, before it costs more than `max_usd` dollars or takes longer than `deadline_s`."""

    max_usd: float | None = None
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_usd", "deadline_s"):
            if getattr(self, name) is not None:
                checks.positive(name, getattr(self, name))
