"""Names of workers."""

WorkerId = tuple[int, int]
"""The stage and the replica of a worker."""


def worker_name(stage: int, replica: int) -> str:
    """Return the short name of a worker, in keys, messages and logs: "s2.r0" is replica 0 of stage 2."""
    return f"s{stage}.r{replica}"


def stage_of(worker: str) -> int:
    """Return the stage of the worker of that name."""
    return int(worker[1:].partition(".")[0])
