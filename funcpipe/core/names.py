"""How workers are identified."""

WorkerId = tuple[int, int]
"""The stage and the replica of a worker."""


def worker_name(stage: int, replica: int) -> str:
    """The short name of a worker, in keys, messages and logs: "s2.r0" is replica 0 of stage 2."""
    return f"s{stage}.r{replica}"
