"""The prices by which a run is billed and limited: those of the region where its functions run."""

import logging

from funcpipe.core import Plan, PlatformSpec
from funcpipe.core.platform import in_region
from funcpipe.platforms.catalog import planned_spec, priced_in, url_region

_log = logging.getLogger(__name__)


def prices_at(url: str, prices: PlatformSpec, *, given: bool) -> PlatformSpec:
    """`prices` in the region of the deployment at `url`; those that are `given` stay as they are, and say so.

    Logs a warning where the functions of that region share less bandwidth than planned.
    """
    region = url_region(url)
    if region is None or region == prices.region:
        return prices
    there = in_region(prices, region) if given else priced_in(prices, region)
    planned, shared = prices.shared_bytes_s, there.shared_bytes_s
    if planned is not None and shared is not None and shared < planned:
        _log.warning(
            "the plan was made for %s, where all functions together move %.2f GB/s; in %s they move %.2f: training may "
            "be slower than predicted; plan again with --platform '%s?region=%s'",
            *(prices.region, planned / 1e9, region, shared / 1e9, prices.name, region),
        )
    return there


def estimated_prices(
    platform: str | PlatformSpec | None, plan: Plan, *, given: PlatformSpec | None, planned: PlatformSpec | None
) -> PlatformSpec:
    """The prices for estimates of a job by `plan`: the `given` ones, or the `planned` ones at `platform`."""
    prices = given or planned or planned_spec(plan)
    return prices_at(platform, prices, given=given is not None) if isinstance(platform, str) else prices
