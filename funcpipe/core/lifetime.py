"""The times at which a function leaves and its successor starts, and how long objects are kept."""

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
