"""A first look at a field: shortest paths for many prices of a second, good plans among them, and a price floor."""

from dataclasses import dataclass

import numpy as np

from funcpipe.core import ScheduleKind
from funcpipe.partitioner.cost.formulas import Array
from funcpipe.partitioner.problem.stage_graph import IntArray
from funcpipe.partitioner.search.option_network import OptionNetwork
from funcpipe.partitioner.search.shortest_paths import ladder, shortest_paths, to_end

_RUNGS = 16
_SLOPES = 10
_SHORTEST_S = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialBounds:
    """Iterations take from `fastest_s` to `slowest_s` seconds. For each slope, price + slope · seconds >= height."""

    fastest_s: float
    slowest_s: float
    least_price_usd_s: float
    slopes: Array
    heights: Array
    paths: IntArray

    def price_usd_s(self, iteration_s: Array) -> Array:
        """What the functions cost at least for each second of an iteration that takes no longer than this."""
        least: Array = np.maximum(
            self.least_price_usd_s, (self.heights - iteration_s[:, None] * self.slopes).max(axis=1)
        )
        return least


def initial_bounds(field: OptionNetwork) -> InitialBounds | None:
    """The first look; None where no path leads from the start to the end."""
    steps = ladder(field, _RUNGS)
    seconds, price = field.options.forward_sum_s + field.closing_s, field.options.price_usd_s
    ends = np.stack([seconds, price], axis=1)
    least = to_end(field, ends, steps.barred)
    lanes_s = field.repeats * steps.lows_s
    fastest_s = float((least[field.start, 0] + lanes_s).min())
    if not np.isfinite(fastest_s):
        return None
    fastest_s = max(fastest_s, _SHORTEST_S)
    slowest_s = max(_slowest_s(field), fastest_s)
    slope = max(float(price.mean()), 1e-12) / slowest_s
    slopes = np.geomspace(slope / 4, slope * 4 * (slowest_s / fastest_s) ** 2, _SLOPES)
    weights = price[:, None] + slopes * seconds[:, None]
    sums = to_end(field, weights, steps.barred)
    paths = [shortest_paths(field, w, steps.barred, found) for w, found in ((ends, least), (weights, sums))]
    return InitialBounds(
        fastest_s=fastest_s,
        slowest_s=slowest_s,
        least_price_usd_s=float(least[field.start, 1].min()),
        slopes=slopes,
        heights=(sums[field.start] + slopes[:, None] * lanes_s).min(axis=1),
        paths=_joined(paths),
    )


def _slowest_s(field: OptionNetwork) -> float:
    """No path takes longer."""
    options, spec = field.options, field.setting.spec
    seconds = np.stack([field.time_s, options.work_s / (spec.shared_cores or np.inf)], axis=1)
    most = -to_end(field, -seconds, np.zeros((len(field), 1)))[field.start, :, 0]
    lanes_s = options.forward_lane_s.max() + options.backward_lane_s.max()
    if field.setting.schedule is not ScheduleKind.GPIPE:
        lanes_s = max(lanes_s, most[0])  # no stage waits for longer than a micro-batch takes there and back
    return float(max(most[0] + field.repeats * lanes_s + options.sync_s.max(), most[1]))


def _joined(paths: list[IntArray]) -> IntArray:
    """The columns of all, filled up with −1."""
    longest = max(len(some) for some in paths)
    return np.concatenate(
        [np.pad(some, ((0, longest - len(some)), (0, 0)), constant_values=-1) for some in paths], axis=1
    )
