"""Windows of time: lower bounds for plans whose iterations take between `low_s` and `high_s` seconds.

The difficulty of the problem is that the price of the functions is *multiplied* by the seconds. In a window the seconds
T lie between `low_s` and `high_s`, and Q = price of the functions + value of a second is at least `second_usd`. Then
(Q − second_usd)(T − low_s) >= 0, and the dollars Q·T + requests are at least

    low_s · Q + second_usd · T + requests − second_usd · low_s,

in which price and time are no longer multiplied (McCormick's envelope): it is a sum over a path, except for the slowest
lanes in T, which `LaneCaps` take care of. The narrower the window, the closer the bound.

By hand: T between 4 and 6 s, at least 2 $ a second. A plan with T = 5 and Q = 3 costs 15 $; the bound says at least
4 · 3 + 2 · 5 − 2 · 4 = 14 $.

Shortest paths from both ends give for every option the least dollars of any plan that has it. Options for which that is
above the threshold leave the window, and with fewer options the bounds rise, so that more leave: `tighten`. The seconds
of a plan are bounded from below in four ways, the larger one counts:

- *timed*: by a weighted mean of the ends of all stages (`initial_bounds`), with all lanes;
- *finished*: by the end of the option's own synchronisation, which waits for the stages behind it alone;
- *untimed*: by `low_s`;
- *worked*: where functions share processors, by the work of all stages.

`first_windows` cuts a space: between its fastest and its slowest plan the seconds are cut into fine steps. In each the
first look bounds the price of a second, and steps in which nothing better than the best plan known can be are left out.
Windows are made of several steps each. By hand: plans take 4 to 10 s, a second costs at least 2 $ in plans of up to 6 s
and 1 $ in all others, and a plan of 7.5 $ is known. Plans of up to 6 s cost 4 · 2 = 8 $ or more, and plans of more than
7.5 s cost more than 7.5 $: the steps from 6 to 7.5 s are left.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from funcpipe.partitioner.cost import Array, IntArray
from funcpipe.partitioner.cost.pipeline import dollars
from funcpipe.partitioner.search.incumbents import Incumbents
from funcpipe.partitioner.search.initial_bounds import (
    InitialBounds,
    LaneCaps,
    closing_s,
    closing_usd,
    from_start,
    improved,
    lane_caps,
    shortest_path,
    to_end,
)
from funcpipe.partitioner.search.option_network import OptionNetwork
from funcpipe.partitioner.search.spaces import Space

_ROUNDS = 6
"""How often options leave and bounds are computed again, at most."""
_HARDLY_FEWER = 0.9
"""If more than this share of the options is kept, another round is not worth its time."""
_IMPROVEMENTS = 1
"""How often the weights of the stages' ends are improved in each round."""
_STEEPNESS = (0.5, 1.0, 1.7, 3.0, 6.0)
"""Slopes that are tried for a bound on the price, as multiples of dollars of a second per second."""


class _Path(IntEnum):
    """The columns of weights along paths: how the seconds of a path are counted.

    The last one is `PASS` to the end, and `FORWARD` from the start.
    """

    TIMED = 0
    UNTIMED = 1
    WORKED = 2
    PASS = -1
    FORWARD = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeWindow:
    """Plans from the options of `network` with iterations of `low_s` to `high_s` seconds, `second_usd` or more each.

    None of them has an objective below `bound_usd`: dollars of an iteration and of the time it takes. `weights` are
    those of `improved`. A path's seconds count `steepness` times, with what that is too much for `high_s`
    subtracted: the price of the limit.
    """

    network: OptionNetwork
    low_s: float
    high_s: float
    time_value_usd_s: float
    second_usd: float
    weights: Array
    bound_usd: float = 0.0
    steepness: float = 1.0

    @property
    def priced_usd(self) -> Array:
        """Each option's dollars for functions, if the iteration took `low_s`, and for requests."""
        priced: Array = dollars(self.network.costs.price_usd_s, self.low_s, self.network.costs.request_usd)
        return priced

    @property
    def offset_usd(self) -> float:
        """The dollars added to the sum over a path of `priced_usd` and `slope_usd` times the seconds."""
        return self.low_s * (self.time_value_usd_s - self.second_usd) - self.steep_usd

    @property
    def slope_usd(self) -> float:
        """The dollars of a second on paths."""
        return self.steepness * self.second_usd

    @property
    def steep_usd(self) -> float:
        """The dollars of a second beyond `second_usd`, for all seconds up to `high_s`."""
        return (self.slope_usd - self.second_usd) * self.high_s

    @property
    def untimed_usd(self) -> float:
        """The dollars of seconds on paths on which they are not summed: there are `low_s`."""
        return self.second_usd * self.low_s + self.steep_usd

    @property
    def work_usd_s(self) -> float:
        """The least dollars of a processor's second of work, through the seconds that it prolongs an iteration by."""
        return self.slope_usd * self.network.setting.seconds_per_work


def tighten(window: TimeWindow, threshold_usd: float, *, caps: int) -> TimeWindow | None:
    """`window` without options that no plan below `threshold_usd` needs; None if there is no such plan."""
    for turn in range(_ROUNDS):
        lanes = lane_caps(window.network, caps)
        window, measure, behind = _bounded(window, lanes)
        if window.bound_usd >= threshold_usd:
            return None
        kept = measure.least_through(behind, lanes)[0] < threshold_usd
        network = window.network if kept.all() else window.network.keep(kept)
        if turn == 0 and len(network):
            network = _in_time(replace(window, network=network), lane_caps(network, caps))
        if not len(network):
            return None
        share = len(network) / len(window.network)
        window = replace(window, network=network)
        if turn and share > _HARDLY_FEWER:
            break
    return window


def _bounded(window: TimeWindow, lanes: LaneCaps) -> "tuple[TimeWindow, _Measure, Array]":
    """The window with better bounds, infinite where no path is left; its dollars, and `to_end` of these."""
    priced = _with_better_price(window, lanes)
    if not np.isfinite(priced.second_usd):
        return replace(window, bound_usd=np.inf), _Measure.dollars(window), np.empty(0)
    window, measure = priced, _Measure.dollars(priced)
    behind = to_end(window.network, measure.to_end(), lanes.excluded)
    return replace(window, bound_usd=max(measure.least(behind, lanes), window.bound_usd)), measure, behind


def _in_time(window: TimeWindow, lanes: LaneCaps) -> OptionNetwork:
    """The options of plans that take no longer than the window."""
    seconds = _Measure.seconds(window.network, window.weights)
    behind = to_end(window.network, seconds.to_end(), lanes.excluded)
    least_s, before_sync_s = seconds.least_through(behind, lanes)
    network, kept = window.network, least_s <= window.high_s
    if network.options.ways.columns > 1:
        network = network.needing(_fewest_ways(network, window.high_s * (1 + 1e-9) - before_sync_s))
    return network if kept.all() else network.keep(kept)


def _fewest_ways(network: OptionNetwork, limit_s: Array) -> IntArray:
    """The first of each option's ways of synchronising that takes no longer than `limit_s`, or the fastest."""
    options, seconds = network.options, network.options.ways.seconds
    first, last = options.fewest, np.full(len(options), seconds.shape[1] - 1)
    while (first < last).any():
        middle = (first + last) // 2
        slower = seconds[options.row, middle] > limit_s
        first, last = np.where(slower, middle + 1, first), np.where(slower, last, middle)
    needed: IntArray = np.minimum(first, seconds.shape[1] - 1)
    return needed


def _with_better_price(window: TimeWindow, lanes: LaneCaps) -> TimeWindow:
    """The window with a better lower bound of what a second costs.

    Where price + slope · T is at least h on all paths, the price is at least h − slope · high_s.
    """
    network = window.network
    slopes, weights = window.second_usd / window.low_s * np.array(_STEEPNESS), window.weights
    found = (-np.inf, 1.0, weights)
    for _ in range(_IMPROVEMENTS + 1):
        seconds = network.costs.forward_sum_s + closing_s(network, weights)
        columns = network.costs.price_usd_s[:, None] + slopes * seconds[:, None]
        least = to_end(network, columns, lanes.excluded)
        whole = least[network.start] + slopes[:, None] * network.repeats * lanes.least_lane_s
        prices = whole.min(axis=1) - slopes * window.high_s
        best = int(prices.argmax())
        found = max(found, (float(prices[best]), float(slopes[best]), weights), key=lambda one: one[0])
        cap = int(whole[best].argmin())
        if not np.isfinite(whole[best, cap]):
            break
        path = shortest_path(network, columns[:, best], lanes.excluded[:, cap], least[:, best, cap])
        slopes, weights = slopes[best : best + 1], improved(network, weights, path)
    price_usd_s, slope, weights = found
    second_usd = max(window.second_usd, price_usd_s + window.time_value_usd_s)
    steepness = max(1.0, slope * window.low_s / second_usd) if 0 < second_usd < np.inf else 1.0
    return replace(window, second_usd=second_usd, steepness=steepness, weights=weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measure:
    """A measure of paths: `fixed` for each option, `second` for each second, `offset` once.

    `untimed_second` is added to paths whose seconds are not counted. `sync` is what each option's synchronisation adds,
    where an iteration ends with it.
    """

    network: OptionNetwork
    fixed: Array
    second: float
    offset: float
    untimed_second: float
    weights: Array
    sync: Array
    closing: Array

    @staticmethod
    def dollars(window: TimeWindow) -> "_Measure":
        """The least dollars of plans in the window."""
        return _Measure(
            network=window.network,
            fixed=window.priced_usd,
            second=window.slope_usd,
            offset=window.offset_usd,
            untimed_second=window.untimed_usd,
            weights=window.weights,
            sync=window.network.sync_usd(window.slope_usd),
            closing=closing_usd(window.network, window.weights, window.slope_usd),
        )

    @staticmethod
    def seconds(network: OptionNetwork, weights: Array) -> "_Measure":
        """The least seconds of an iteration."""
        return _Measure(
            network=network,
            fixed=np.zeros(len(network)),
            second=1.0,
            offset=0.0,
            untimed_second=0.0,
            weights=weights,
            sync=network.costs.sync_s,
            closing=closing_s(network, weights),
        )

    def to_end(self) -> Array:
        """The weights of each option on the way to the end; columns as in `_Path`."""
        return self._columns(self.fixed + self.second * self.network.pass_s)

    def from_start(self) -> Array:
        """The weights of each option on the way from the start; columns as in `_Path`."""
        return self._columns(self.fixed + self.second * self.network.costs.forward_sum_s)

    def _columns(self, last: Array) -> Array:
        network = self.network
        columns = [self.fixed + self.second * network.costs.forward_sum_s + self.closing, self.fixed]
        if network.setting.seconds_per_work:
            columns.append(self.fixed + self.second * network.setting.seconds_per_work * network.costs.work_s)
        return np.stack([*columns, last], axis=1)

    def least(self, behind: Array, lanes: LaneCaps) -> float:
        """The least of any path, given `behind` = to_end of the weights."""
        whole = behind[self.network.start]
        timed = (whole[_Path.TIMED] + self.second * self.network.repeats * lanes.least_lane_s).min()
        untimed = whole[_Path.UNTIMED : _Path.PASS, -1].copy()  # with that of the work, where it counts
        untimed[0] += self.untimed_second
        return float(max(timed, untimed.max()) + self.offset)

    def least_through(self, behind: Array, lanes: LaneCaps) -> tuple[Array, Array]:
        """For each option the least of any path through it, given `behind` = to_end of the weights; and the least that
        it takes until its synchronisation begins.
        """
        network, options, costs = self.network, self.network.options, self.network.costs
        weights, repeats = self.from_start(), self.second * self.network.repeats
        ahead = from_start(network, weights, lanes.excluded)
        before, after = options.before, options.after
        timed_ahead, timed_behind = ahead[before, _Path.TIMED], behind[after, _Path.TIMED]
        admitted = np.where(np.arange(len(lanes.caps_s)) >= lanes.first[:, None], 0.0, np.inf)
        timed = (timed_ahead + timed_behind + repeats * lanes.least_lane_s + admitted).min(axis=1)
        timed += weights[:, _Path.TIMED]
        # no iteration ends before this option's own synchronisation, which waits for the stages behind it alone
        own_lanes = repeats * np.maximum(lanes.least_lane_s, costs.forward_lane_s[:, None])
        finished = ahead[before, _Path.FORWARD, -1] + (behind[after, _Path.PASS] + own_lanes).min(axis=1)
        finished += self.fixed + self.second * network.pass_s + repeats * costs.backward_lane_s
        rest = slice(_Path.UNTIMED, weights.shape[1] - 1)
        untimed = ahead[before, rest, -1] + behind[after, rest, -1] + weights[:, rest]
        untimed[:, 0] += self.untimed_second
        result: Array = np.maximum(np.maximum(timed, finished + self.sync), untimed.max(axis=1)) + self.offset
        return result, finished


_FINE_STEP = 1.02
"""The ratio of the seconds between which the price of a second is bounded, before windows are made of such steps."""
_STEPS_OF_A_WINDOW = 16
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
            for steps in np.array_split(run, -(-len(run) // _STEPS_OF_A_WINDOW)):
                yield TimeWindow(
                    network=space.network,
                    low_s=float(times_s[steps[0]]),
                    high_s=float(times_s[steps[-1] + 1]),
                    time_value_usd_s=value_usd_s,
                    second_usd=float(seconds_usd[steps].min()),
                    weights=bounds.weights,
                    bound_usd=float((seconds_usd * times_s[:-1])[steps].min()),
                )
