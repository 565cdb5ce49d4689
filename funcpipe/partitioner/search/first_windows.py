"""The windows into which a space is cut before it is searched, from a first look at it.

Between the fastest and the slowest plan the seconds are cut into fine steps. In each the first look bounds the price of
a second, and steps in which nothing better than the best plan known can be are left out. Windows are made of several
steps each.

By hand: plans take 4 to 10 s, a second costs at least 2 $ in plans of up to 6 s and 1 $ in all others, and a plan of
7.5 $ is known. Plans of up to 6 s cost 4 · 2 = 8 $ or more, and plans of more than 7.5 s cost more than 7.5 $: the
steps from 6 to 7.5 s are left.
"""

import math
from collections.abc import Iterator

import numpy as np

from funcpipe.partitioner.search.incumbents import Incumbents
from funcpipe.partitioner.search.initial_bounds import InitialBounds
from funcpipe.partitioner.search.spaces import Space
from funcpipe.partitioner.search.time_window import TimeWindow

_FINE_STEP = 1.02
"""The ratio of the seconds between which the price of a second is bounded, before windows are made of such steps."""
_STEPS = 16
"""How many of these steps make a window, at most."""
ROUNDING = 1e-9


def first_windows(space: Space, bounds: InitialBounds, incumbents: Incumbents) -> Iterator[TimeWindow]:
    """The windows in which a plan of `space` may be better than the incumbents."""
    low_s = bounds.fastest_s * (1 - ROUNDING)
    latest_s = min(bounds.slowest_s * space.slowdown * (1 + ROUNDING), incumbents.latest_s)
    threshold_usd = float(incumbents.threshold_usd(np.array([low_s]))[0])
    value_usd_s = incumbents.time_value_usd_s
    least_usd_s = bounds.least_price_usd_s + value_usd_s
    if least_usd_s > 0:
        latest_s = min(latest_s, threshold_usd / least_usd_s)
    if low_s > latest_s:
        return
    times_s = np.geomspace(low_s, latest_s, 2 + int(math.log(latest_s / low_s) / math.log(_FINE_STEP)))
    seconds_usd = (bounds.price_usd_s(times_s[1:]) + value_usd_s) * (1 - ROUNDING)
    promising = seconds_usd * times_s[:-1] < incumbents.threshold_usd(times_s[:-1])
    for run in np.split(np.arange(len(promising)), np.flatnonzero(np.diff(promising)) + 1):
        if promising[run[0]]:
            for steps in np.array_split(run, -(-len(run) // _STEPS)):
                yield TimeWindow(
                    network=space.network,
                    low_s=float(times_s[steps[0]]),
                    high_s=float(times_s[steps[-1] + 1]),
                    time_value_usd_s=value_usd_s,
                    second_usd=float(seconds_usd[steps].min()),
                    weights=bounds.weights,
                    bound_usd=float((seconds_usd * times_s[:-1])[steps].min()),
                )
