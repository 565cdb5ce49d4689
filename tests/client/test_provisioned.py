"""Functions are kept ready for a run only where that makes it cheaper."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import pytest

from funcpipe.client.prepare.provisioned import choose_provisioned
from funcpipe.core import Estimate, JobEstimate, Plan, PlatformSpec
from funcpipe.core.estimate import JobItem
from funcpipe.errors import InvalidValue
from funcpipe.platforms.base import Platform, ProvisioningPlatform
from funcpipe.platforms.catalog import load_spec
from tests.e2e import small

SPEC = load_spec("aws-lambda")
ITERATION = Estimate(
    iteration_s=2.5,
    cost_usd=0.1,
    compute_usd=0.1,
    request_usd=0,
    peak_memory_bytes=1,
    puts=0,
    gets=0,
    bottleneck="compute",
    stages=(),
)
PLAN = replace(small.plan(2, 8), estimate=ITERATION)


@dataclass(frozen=True)
class Keeping:
    """As much of a platform as says that it could keep functions ready."""

    spec: PlatformSpec = SPEC
    url: str = "aws-lambda://funcpipe"

    def check(self, plan: Plan, *, run_s: float | None = None) -> None: ...

    invoke = status = stop = detach = wrap_key = unwrap_key = logs = provision = release = check


PLATFORM = cast(Platform, Keeping())


def lasting(seconds: float) -> Callable[[PlatformSpec], JobEstimate]:
    """The estimates of a run of `PLAN` that takes so many seconds."""

    def at(prices: PlatformSpec) -> JobEstimate:
        usd_s = PLAN.replicas * sum(prices.size(stage.size).price_usd_s for stage in PLAN.stages)
        training = JobItem(count=1, seconds=seconds, functions_usd=seconds * usd_s, requests_usd=0.01)
        return JobEstimate(platform="aws-lambda", epochs=1, steps=1, start=JobItem(), training=training)

    return at


def billed(seconds: float, *, functions: int, kept: int) -> float:
    """What AWS bills for functions of 1 GB in a run that takes so long, with or without some that are kept ready."""
    if not kept:
        return functions * seconds * 1.66667e-5
    reserved_s = -(-(seconds + 180) // 300) * 300
    return functions * seconds * 9.7222e-6 + kept * reserved_s * 4.1667e-6


@pytest.mark.parametrize("seconds", [60, 200, 299, 420, 600, 720, 850, 1200, 3600, 86_400])
def test_they_are_kept_ready_exactly_where_that_is_cheaper(seconds: float) -> None:
    found, estimate = choose_provisioned(PLAN, PLATFORM, SPEC, lasting(seconds))
    spare = 0 if seconds <= 450 else 16 * 12.5 // 450 + 1  # each runs 1.5 x 5 s and two steps beside its successor
    on_demand, kept = billed(seconds, functions=16, kept=0), billed(seconds, functions=16, kept=int(16 + spare))
    assert (found is not None) == (kept < on_demand)
    assert estimate.cost_usd == pytest.approx(min(kept, on_demand) + 0.01, rel=1e-4)
    if found is None:
        assert "kept ready, functions would make it $" in estimate.prices_note
        return
    assert found.share == pytest.approx(kept / on_demand, rel=1e-4)
    assert found.spare == {PLAN.stages[0].size: spare}
    assert found.released_after_s == pytest.approx(180 + 1.25 * seconds)
    assert "on demand it would be $" in estimate.prices_note


def test_it_is_refused_where_no_functions_are_kept_ready_or_nothing_is_estimated() -> None:
    assert isinstance(PLATFORM, ProvisioningPlatform)
    nowhere = cast(Platform, Keeping(spec=load_spec("aliyun-fc")))
    with pytest.raises(InvalidValue, match=r"provisioned must be left out here: only functions of AWS Lambda"):
        choose_provisioned(PLAN, nowhere, SPEC, lasting(3600))
    with pytest.raises(InvalidValue, match=r"provisioned needs a plan with an estimate"):
        choose_provisioned(replace(PLAN, estimate=None), PLATFORM, SPEC, lasting(3600))
