"""The choice between functions that a platform keeps ready for a run, and those that it starts on demand."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from funcpipe.core import JobEstimate, Plan, PlatformSpec
from funcpipe.core.provisioned import Provisioned, spare_functions
from funcpipe.core.settings import overlap_s
from funcpipe.core.texts import usd_text
from funcpipe.errors import InvalidValue
from funcpipe.platforms.base import Platform, ProvisioningPlatform


def choose_provisioned(
    plan: Plan, platform: Platform, prices: PlatformSpec, estimated: Callable[[PlatformSpec], JobEstimate | None]
) -> tuple[Provisioned | None, JobEstimate]:
    """Return how functions are kept ready, None if the run is no cheaper so, and the estimate of the run; it says why.

    `prices` are those on demand, and `estimated` estimates the run at these or others. Raises InvalidValue for a
    platform that keeps no functions ready, and for a plan without an estimate.
    """
    terms, found = platform.spec.provisioned, estimated(prices)
    if terms is None or not isinstance(platform, ProvisioningPlatform):
        raise InvalidValue("provisioned", True, "must be left out here: only functions of AWS Lambda are kept ready")
    if found is None or plan.estimate is None:
        raise InvalidValue("provisioned", True, "needs a plan with an estimate, as `funcpipe optimize` writes it")
    run_s, spec = found.seconds, platform.spec
    counts = Counter(stage.size for stage in plan.stages * plan.replicas)
    beside_s = overlap_s(spec.cold_start_s, plan.estimate.iteration_s)
    spare = {
        size: spare_functions(count, run_s=run_s, life_s=spec.lifetime_s, beside_s=beside_s)
        for size, count in counts.items()
    }
    usd_s = {size: prices.size(size).price_usd_s for size in counts}
    cost = sum(usd_s[size] * count for size, count in counts.items())
    share = terms.share(run_s, spare=sum(usd_s[size] * count for size, count in spare.items()) / cost)
    kept = estimated(prices.priced_at(share))
    assert kept is not None
    if kept.cost_usd >= found.cost_usd:
        why = f"kept ready, functions would make it ${usd_text(kept.cost_usd)}: they are started on demand"
        return None, _noted(found, why)
    after_s = terms.released_after_s(run_s)
    why = f"functions are kept ready, at {share:.2f} of their price; on demand it would be ${usd_text(found.cost_usd)}"
    return Provisioned(share=share, spare=spare, released_after_s=after_s), _noted(kept, why)


def _noted(estimate: JobEstimate, why: str) -> JobEstimate:
    return replace(estimate, prices_note="; ".join(filter(None, (estimate.prices_note, why))))
