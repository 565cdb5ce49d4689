"""Windows of time: what the plans of one setting whose iterations take so and so long cost at least.

In a window the seconds T of an iteration lie between `low_s` and `high_s`, and what a second costs, Q = price of the
functions + value of time, is at least `second_usd`. So (Q − second_usd)(T − low_s) >= 0, and the dollars Q·T + requests
are at least

    low_s · Q + second_usd · T + requests − second_usd · low_s,

in which price and time are no longer multiplied: sums over a path of the stage graph, up to the slowest lanes, for
which a ladder of caps is climbed. An option on no path below the threshold leaves the window, and with fewer options
the bounds rise. docs/planning.md has the whole story.
"""

from dataclasses import dataclass

import numpy as np

from funcpipe.partitioner.cost.formulas import Array
from funcpipe.partitioner.search.option_network import OptionNetwork
from funcpipe.partitioner.search.shortest_paths import Ladder, from_start, ladder, to_end

_ROUNDS = 6
_HARDLY_FEWER = 0.9
_STEEPNESS = (0.4, 1.0, 2.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeWindow:
    """Plans of the options of `field` with iterations of `low_s` to `high_s` seconds and `second_usd` or more a second.

    No plan in it is below `bound_usd`: dollars of an iteration and of the time it takes.
    """

    field: OptionNetwork
    low_s: float
    high_s: float
    time_value_usd_s: float
    second_usd: float
    bound_usd: float = 0.0

    @property
    def priced_usd(self) -> Array:
        """Each option's dollars for functions, were the iteration `low_s` long, and for requests."""
        return self.low_s * self.field.options.price_usd_s + self.field.options.request_usd

    @property
    def offset_usd(self) -> float:
        """What is added to the sum over a path of `priced_usd` and `second_usd` times the seconds."""
        return self.low_s * (self.time_value_usd_s - self.second_usd)

    def at(self, **changes: object) -> "TimeWindow":
        """The window with some fields changed."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return TimeWindow(**(values | changes))


def tighten(window: TimeWindow, threshold_usd: float, *, rungs: int) -> TimeWindow | None:
    """`window` without options that no plan below `threshold_usd` has; None if there is no such plan."""
    steps = ladder(window.field, rungs)
    window, _ = _bounded(window, steps)
    if window.bound_usd >= threshold_usd:
        return None
    field = _in_time(window, steps)
    for _ in range(_ROUNDS):
        if not len(field):
            return None
        steps = ladder(field, rungs)
        window, behind = _bounded(window.at(field=field), steps)
        if window.bound_usd >= threshold_usd:
            return None
        kept = _Measure.dollars(window).least_through(behind, steps) < threshold_usd
        if kept.all():
            return window
        field = field.keep(kept)
        if kept.mean() > _HARDLY_FEWER:
            break
    return window.at(field=field) if len(field) else None


def _bounded(window: TimeWindow, steps: Ladder) -> tuple[TimeWindow, Array]:
    """The window with better bounds, infinite where no path is left; and `to_end` of its dollars."""
    window = _with_dearer_second(window, steps)
    if not np.isfinite(window.second_usd):
        return window.at(bound_usd=np.inf), np.empty(0)
    dollars = _Measure.dollars(window)
    behind = to_end(window.field, dollars.weights(), steps.barred)
    return window.at(bound_usd=max(dollars.least(behind, steps), window.bound_usd)), behind


def _in_time(window: TimeWindow, steps: Ladder) -> OptionNetwork:
    """The options of the window's field that plans in the window can have."""
    seconds = _Measure.seconds(window.field)
    behind = to_end(window.field, seconds.weights(), steps.barred)
    kept = seconds.least_through(behind, steps) <= window.high_s
    return window.field if kept.all() else window.field.keep(kept)


def _with_dearer_second(window: TimeWindow, steps: Ladder) -> TimeWindow:
    """The window with a better lower bound of what a second costs.

    price + slope · T is at least h on all paths, so price is at least h − slope · high_s.
    """
    field = window.field
    slopes = window.second_usd / window.low_s * np.array(_STEEPNESS)
    seconds = field.options.forward_sum_s + field.closing_s
    weights = field.options.price_usd_s[:, None] + slopes * seconds[:, None]
    least = to_end(field, weights, steps.barred)[field.start] + slopes[:, None] * field.repeats * steps.lows_s
    price = float((least.min(axis=1) - slopes * window.high_s).max())
    return window.at(second_usd=max(window.second_usd, price + window.time_value_usd_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measure:
    """What is measured along paths: `fixed` for each option, `second` for each second, `offset` once.

    `untimed_second` is added for paths whose seconds are not counted.
    """

    field: OptionNetwork
    fixed: Array
    second: float
    offset: float
    untimed_second: float

    @staticmethod
    def dollars(window: TimeWindow) -> "_Measure":
        """Dollars of plans in the window, at least."""
        return _Measure(
            field=window.field,
            fixed=window.priced_usd,
            second=window.second_usd,
            offset=window.offset_usd,
            untimed_second=window.second_usd * window.low_s,
        )

    @staticmethod
    def seconds(field: OptionNetwork) -> "_Measure":
        """Seconds of an iteration, at least."""
        return _Measure(field=field, fixed=np.zeros(len(field)), second=1.0, offset=0.0, untimed_second=0.0)

    def weights(self) -> Array:
        """Of each option: with all lanes and the first stage's synchronisation; without seconds; where processors are
        shared, with the seconds of its work.
        """
        field = self.field
        columns = [self.fixed + self.second * (field.options.forward_sum_s + field.closing_s), self.fixed]
        if field.setting.spec.shared_cores is not None:
            columns.append(self.fixed + self.second / field.setting.spec.shared_cores * field.options.work_s)
        return np.stack(columns, axis=1)

    def least(self, behind: Array, steps: Ladder) -> float:
        """The least of any path, given `behind` = to_end of the weights."""
        whole = behind[self.field.start]
        timed = (whole[0] + self.second * self.field.repeats * steps.lows_s).min()
        untimed = whole[1:, -1].copy()
        untimed[0] += self.untimed_second
        return float(max(timed, untimed.max()) + self.offset)

    def least_through(self, behind: Array, steps: Ladder) -> Array:
        """For each option the least of any path through it, given `behind` = to_end of the weights."""
        field, options = self.field, self.field.options
        weights, repeats = self.weights(), self.second * self.field.repeats
        forward = self.fixed + self.second * options.forward_sum_s
        ahead = from_start(field, np.concatenate([weights, forward[:, None]], axis=1), steps.barred)
        before, after = options.before, options.after
        admitted = np.where(np.arange(len(steps.caps_s)) >= steps.rung[:, None], 0.0, np.inf)
        timed = (ahead[before, 0] + behind[after, 0] + repeats * steps.lows_s + admitted).min(axis=1) + weights[:, 0]
        # no iteration ends before this option's own synchronisation, which waits for the stages behind alone
        lanes = repeats * np.maximum(steps.lows_s, field.lane_s[:, None])
        finished = ahead[before, -1, -1] + (behind[after, 0] + lanes).min(axis=1)
        finished += self.fixed + self.second * (field.time_s + options.sync_s)
        untimed = ahead[before, 1:-1, -1] + behind[after, 1:, -1] + weights[:, 1:]
        untimed[:, 0] += self.untimed_second
        result: Array = np.maximum(np.maximum(timed, finished), untimed.max(axis=1)) + self.offset
        return result
