"""Checks that refuse a job before it starts if its estimate exceeds a limit of cost or time."""

from funcpipe.core import JobEstimate, RunLimits
from funcpipe.core.texts import time_text
from funcpipe.errors import PlanError


def check_limits(estimate: JobEstimate, limits: RunLimits, *, elapsed_s: float = 0.0) -> None:
    """Raise PlanError if the run, which has taken `elapsed_s` before, is expected to reach a limit before its end."""
    check_expected(usd=estimate.cost_usd, seconds=elapsed_s + estimate.seconds, line=estimate.line(), limits=limits)


def check_expected(*, usd: float, seconds: float, line: str, limits: RunLimits) -> None:
    """The same for a run that is expected to cost `usd` dollars and to take `seconds` in all, as `line` says."""
    if limits.allow_partial:
        return
    way_out = (
        "raise the limit, train for fewer epochs, or train as far as the limit allows, to be resumed later: --yes "
        "(in Python: RunLimits(allow_partial=True))"
    )
    if limits.max_usd is not None and usd > limits.max_usd:
        raise PlanError(f"the job is expected to cost more than the limit of ${limits.max_usd:g}: {line}; {way_out}")
    if limits.deadline_s is not None and seconds > limits.deadline_s:
        raise PlanError(
            f"the job is expected to take {time_text(seconds)}, longer than the limit of "
            f"{time_text(limits.deadline_s)}: {line}; {way_out}"
        )
