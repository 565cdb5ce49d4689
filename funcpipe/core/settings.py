"""The settings of a run: how it copes with failures, its cost limits, where its objects lie, and for how long."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, TypedDict

from funcpipe.core import checks
from funcpipe.core.platform import PlatformSpec
from funcpipe.core.stores import storage_of
from funcpipe.errors import InvalidValue


class OnOutOfMemory(Enum):
    """The reaction to a function that runs out of memory: end the run, or restart the stage in larger functions.

    These are the smallest with room for the measured peak and an eighth more.
    """

    FAIL = "fail"
    GROW = "grow"


class OnDrift(Enum):
    """The reaction to a replica whose parameters differ from the first one's: copy them, or end the run."""

    COPY = "copy"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultTolerance:
    """The times at which workers save their state and count as lost, and what stays in storage after a failure.

    Args:
        checkpoint_steps: The steps between checkpoints of a stage. If that is None, the interval follows from measured
            times and from the next three.
        failure_interval_s: One failure of a function is expected in so many seconds.
        retained_bytes: The most bytes of messages that are kept for one worker to read again.
        retained_objects: The most messages of one worker that are kept, as far as checkpoints do not take more than a
            fiftieth of its time for it; and about as many of its losses have an object of their own.
        lifetime_s: A function hands over to a successor before it is so old.
        cold_start_s: A function is expected to start within so many seconds.
        start_s: It counts as lost after so many more without a heartbeat.
        max_attempts: After so many functions of one worker the run ends, and can be resumed: functions that start
            functions end at last.
        heartbeat_s: The seconds between heartbeats.
        lease_s: A lease that was checked within so many seconds is not checked again before a write.
        compare_steps: The replicas of a stage compare hashes of their parameters at each checkpoint, and every so many
            steps.
        on_drift: A replica that differs from the first one, as it may on another kind of processor, goes back to the
            stage's checkpoint and repeats the steps since ("copy"), or the run ends ("fail").
        on_oom: When a function runs out of memory, the run ends ("fail"), or the stage restarts in larger functions
            ("grow").
        keep: A run that fails or is stopped stays as it is in a storage that lasts, so that it can be resumed; with
            this, in any.
    """

    checkpoint_steps: int | None = None
    failure_interval_s: float = 86_400.0
    retained_bytes: int = 8 << 30
    retained_objects: int = 100
    lifetime_s: float | None = None
    cold_start_s: float = 0.0
    start_s: float = 60.0
    max_attempts: int = 2000
    heartbeat_s: float = 10.0
    lease_s: float = 10.0
    compare_steps: int | None = None
    on_drift: OnDrift = OnDrift.COPY
    on_oom: OnOutOfMemory = OnOutOfMemory.FAIL
    keep: bool = False

    def __post_init__(self) -> None:
        checks.choose(self, "on_drift", OnDrift)
        checks.choose(self, "on_oom", OnOutOfMemory)
        checks.all_whole(self, 1, "checkpoint_steps", "compare_steps")
        checks.all_positive(self, "lifetime_s", "failure_interval_s", "retained_bytes", "retained_objects")
        checks.all_positive(self, "start_s", "heartbeat_s", "lease_s")
        checks.at_least("cold_start_s", self.cold_start_s, 0)
        checks.at_least("max_attempts", self.max_attempts, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """A run ends, and can be resumed, before it costs more than `max_usd` dollars or takes longer than `deadline_s`.

    A run that is expected to reach a limit before its last step is not started, unless with `allow_partial`.
    """

    max_usd: float | None = None
    deadline_s: float | None = None
    allow_partial: bool = False

    def __post_init__(self) -> None:
        checks.all_positive(self, "max_usd", "deadline_s")


LAST = "last"
"""Stands for the run in a storage that was started or resumed last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The name of a run, its storage, and how it begins and ends.

    Args:
        name: The new run's name, by default one of its own.
        storage: A URL, or one for "default" and for each kind of object that a plan keeps in a store of its own; by
            default the deployment's own storage, or a temporary folder on the local platform.
        resume: The run in that storage to continue, or "last": the one that was started or resumed last.
        message_deadline_s: A message that is not there after so many seconds, in which no function was started, ends
            the run.
        prices: The prices it is billed at, by default those of the plan's platform.
        take_over: A run that another client owns is ended, and then continued here.
        from_start: A run is resumed at its first step, from the parameters that were uploaded for it, whatever it has
            saved.
        keep_model: A run whose storage lasts, being given or a deployment's own, keeps its model there when it has
            finished: what `export` reads and `resume` continues for more epochs, until `clean` deletes it.
        rehearse: Before anything is started, one micro-batch is trained on here and forgotten, to find mistakes.
        provisioned: The platform keeps the run's functions ready, as it offers that, where this makes the run cheaper.
    """

    name: str | None = None
    storage: str | None = None
    resume: str | None = None
    message_deadline_s: float = 300.0
    prices: PlatformSpec | None = None
    take_over: bool = False
    from_start: bool = False
    keep_model: bool = True
    rehearse: bool = True
    provisioned: bool = False

    def __post_init__(self) -> None:
        checks.positive("message_deadline_s", self.message_deadline_s)
        if self.name == LAST:
            raise InvalidValue("run", LAST, "must be another name: this one is for the run that was begun last")


class RunKeywords(TypedDict, total=False):
    """The fields of `RunSettings` as `train` and `start` take them by keyword; `run` is the new run's name."""

    run: str | None
    storage: str | Mapping[str, str] | None
    resume: str | None
    message_deadline_s: float
    prices: PlatformSpec | None
    take_over: bool
    from_start: bool
    keep_model: bool
    rehearse: bool
    provisioned: bool


def settings_with(settings: RunSettings, keywords: RunKeywords) -> RunSettings:
    """Return `settings` with those that `keywords` give."""
    checks.kind_of("settings", settings, RunSettings)
    given: dict[str, Any] = {"name" if key == "run" else key: value for key, value in keywords.items()}
    if given.get("storage") is not None:
        given["storage"] = storage_of(given["storage"])
    return replace(settings, **given)


DEFAULT_FAULTS = FaultTolerance()
NO_LIMITS = RunLimits()
DEFAULT_SETTINGS = RunSettings()


_RESERVE = 0.02
"""The part of a function's lifetime kept for steps or checkpoints that take longer than any before."""

_COLD_STARTS = 1.5
"""The number of cold starts that a successor is given to become ready."""

KEEP_DAYS = 7
"""The days after which the objects of runs in a deployment's own bucket expire, by default."""

LEAST_KEEP_DAYS = 2
"""The least such number: a run that goes on makes its objects young again once a day."""

WHY_GONE = (
    "the run was collected or deleted, the storage deletes objects by their age (a lifecycle rule), or its reads lag "
    "behind writes"
)
"""The reason why an object of a run may be missing."""


def overlap_s(cold_start_s: float, step_s: float) -> float:
    """Return the seconds before it leaves at which a function starts its successor, so that it is ready in time."""
    return _COLD_STARTS * cold_start_s + 2 * step_s


def leaves_at_s(lifetime_s: float, step_s: float, saving_s: float) -> float:
    """Return the age at which a function leaves: two more steps, and a checkpoint twice as slow, still end in time."""
    return lifetime_s * (1 - _RESERVE) - 2 * step_s - 2 * saving_s
