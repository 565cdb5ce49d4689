"""Ways of synchronising for paths that were found without: plans to begin with.

When it is said by when an iteration must end, each stage takes the way with the fewest requests that is in time. Ends
are tried from the earliest there is to where every stage takes the fewest requests of all.
"""

from collections.abc import Iterator

import numpy as np

from funcpipe.partitioner.cost.arrays import Array, IntArray
from funcpipe.partitioner.cost.pipeline import PlanTail, StageCosts, ended_s, synchronised_s, with_stage
from funcpipe.partitioner.search.option_network import OptionNetwork

_ENDS = 8
"""How many ends are tried."""


def timed_paths(network: OptionNetwork, paths: IntArray) -> Iterator[tuple[IntArray, IntArray]]:
    """The `paths` (columns of options, then −1) with ways of synchronising for them, for several ends."""
    row, table = network.options.row[paths], network.options.ways
    if len(table.usd) == 1:
        yield paths, np.zeros_like(paths)
        return
    begun_s, forward_s = _before_sync(network, paths)
    here = paths >= 0
    ends_s = [
        np.where(here, forward_s + begun_s + table.seconds[row, way], 0.0).max(axis=0)
        for way in (len(table.usd) - 1, 0)
    ]
    for share in np.linspace(0.0, 1.0, _ENDS):
        end_s = (ends_s[0] + share * (ends_s[1] - ends_s[0])) * (1 + 1e-12)
        late = table.seconds[row] > (end_s - forward_s - begun_s)[..., None]
        yield paths, np.minimum(late.sum(axis=-1), len(table.usd) - 1)


def _before_sync(network: OptionNetwork, paths: IntArray) -> tuple[Array, Array]:
    """When each stage begins to synchronise, counted from the end of the forwards; and when these end, for each path."""
    options, repeats = network.options, network.repeats
    shares = network.setting.round_shares(len(paths))[::-1]
    stages = np.zeros(paths.shape[1], dtype=np.int64)
    begun_s, tail = np.zeros(paths.shape), PlanTail.empty(paths.shape[1])
    for place in reversed(range(len(paths))):
        chosen = paths[place]
        here = chosen >= 0
        stage = StageCosts(*(column[chosen] for column in options.costs))._replace(share=shares[stages])
        longer = with_stage(tail, stage, repeats=repeats)
        tail = PlanTail(*(np.where(here, new, old) for new, old in zip(longer, tail, strict=True)))
        begun_s[place] = synchronised_s(tail.backward_s, tail.backward_lane_s, 0.0, repeats)
        stages = stages + here
    return begun_s, ended_s(tail.forward_s, tail.forward_lane_s, 0.0, repeats)
