"""Ways of synchronising for complete paths: for each end of an iteration, those that are in time with fewest requests.

A plan ends with the synchronisation of some stage in some way. So it is enough to try these ends: for each, every other
stage takes the way with the fewest requests that is in time. By hand: of two stages the first may end after 9 or 7 s,
the second after 8 or 6 s, the faster way for more dollars. Four ends: with 9 s both take the cheap way, with 8 s the
first takes the fast one, with 7 s both do, and 6 s cannot be.
"""

import numpy as np

from funcpipe.partitioner.cost import Array, IntArray
from funcpipe.partitioner.cost.pipeline import PlanTail, StageCosts, synchronised_s, with_stage
from funcpipe.partitioner.search.option_network import OptionNetwork

_ENDS = 8
"""How many ends are tried for a quick look."""
_ROUNDING = 1e-12


def all_ends(network: OptionNetwork, paths: IntArray) -> tuple[IntArray, IntArray]:
    """The `paths` (columns of options, then −1), repeated for all ends that may be best; and the way of each option."""
    begun_s, seconds = _ways_of(network, paths)
    here = paths >= 0
    earliest_s = np.where(here, begun_s + seconds[..., -1], -np.inf).max(axis=0)
    ends_s = (begun_s[..., None] + seconds).transpose(1, 0, 2)
    wanted = here.T[..., None] & (ends_s >= earliest_s[:, None, None] * (1 - _ROUNDING))
    path = np.nonzero(wanted)[0]
    return _in_time(paths[:, path], begun_s[:, path], seconds[:, path], ends_s[wanted])


def few_ends(network: OptionNetwork, paths: IntArray) -> tuple[IntArray, IntArray]:
    """The same for some ends between the earliest there is and that of the fewest requests."""
    begun_s, seconds = _ways_of(network, paths)
    here = paths >= 0
    first_s, last_s = (np.where(here, begun_s + seconds[..., way], -np.inf).max(axis=0) for way in (-1, 0))
    shares = np.linspace(0.0, 1.0, _ENDS if seconds.shape[-1] > 1 else 1)
    ends_s = (first_s + shares[:, None] * (last_s - first_s)).ravel()
    path = np.tile(np.arange(paths.shape[1]), len(shares))
    return _in_time(paths[:, path], begun_s[:, path], seconds[:, path], ends_s)


def _in_time(paths: IntArray, begun_s: Array, seconds: Array, ends_s: Array) -> tuple[IntArray, IntArray]:
    """The paths, and for each option the way with the fewest requests that ends by `ends_s`, or the fastest."""
    limit_s = ends_s * (1 + _ROUNDING) - begun_s
    late = (seconds > limit_s[..., None]).sum(axis=-1)
    return paths, np.minimum(late, seconds.shape[-1] - 1)


def _ways_of(network: OptionNetwork, paths: IntArray) -> tuple[Array, Array]:
    """For each option on the paths when it begins to synchronise, counted from the end of the forwards, and the seconds
    of its ways.
    """
    return _begun_s(network, paths), network.options.ways.seconds[network.options.row[paths]]


def _begun_s(network: OptionNetwork, paths: IntArray) -> Array:
    options, repeats = network.options, network.repeats
    begun_s, tail = np.zeros(paths.shape), PlanTail.empty(paths.shape[1])
    for place in reversed(range(len(paths))):
        chosen = paths[place]
        stage = StageCosts(*(column[chosen] for column in options.costs))
        longer = with_stage(tail, stage, repeats=repeats)
        tail = PlanTail(*(np.where(chosen >= 0, new, old) for new, old in zip(longer, tail, strict=True)))
        begun_s[place] = synchronised_s(tail.backward_s, tail.backward_lane_s, 0.0, repeats)
    return begun_s
