"""When a function leaves before its platform ends it, when its successor is started, and how long objects are kept."""

_RESERVE = 0.02
"""The part of a function's lifetime kept for steps or checkpoints that take longer than any before."""

_COLD_STARTS = 1.5
"""How many cold starts a successor is given to become ready."""

KEEP_DAYS = 7
"""After how many days the objects of runs in a deployment's own bucket expire, unless another number is wanted."""

LEAST_KEEP_DAYS = 2
"""The least such number: a run that goes on makes its objects young again once a day."""

WHY_GONE = (
    "the run was deleted, the storage deletes objects by their age (a lifecycle rule), or its reads lag behind writes"
)
"""Why an object of a run that was there may be missing."""


def overlap_s(cold_start_s: float, step_s: float) -> float:
    """How long before a function leaves it starts its successor, so that that is ready in time."""
    return _COLD_STARTS * cold_start_s + 2 * step_s


def leaves_at_s(lifetime_s: float, step_s: float, saving_s: float) -> float:
    """The age at which a function leaves: two more steps, and a checkpoint twice as slow, still end in time."""
    return lifetime_s * (1 - _RESERVE) - 2 * step_s - 2 * saving_s
