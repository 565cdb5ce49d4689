"""Parameters that several layers use: what stages hold and send of them, from the borders of the stages alone.

By hand: layers 0 and 3 share 8 bytes. As stages [0, 2) and [2, 4), both hold them, the second one borrows the sum: it
sends its gradient and reads the sum, the first one reads that gradient and sends the sum. In one stage [0, 4) they are
merely counted twice by the sum over layers.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from funcpipe.core import ModelProfile
from funcpipe.partitioner.cost.arrays import Array, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Ties:
    """What stages have of parameters that several layers use.

    `repeated_bytes` is what a sum over layers counts too often; the gradients of `borrowed_bytes` are summed over the
    replicas by an earlier stage; the rest is what one function sends and reads of their gradients in an iteration.
    """

    repeated_bytes: Array
    borrowed_bytes: Array
    upload_bytes: Array
    upload_objects: Array
    download_bytes: Array
    download_objects: Array


def stage_ties(first: IntArray, stop: IntArray, profile: ModelProfile) -> Ties:
    """For stages [first, stop), an element each.

    A gradient goes from holder to holder, starting at the last one, and the sum goes from the first holder to each of
    the others: what a stage sends and reads depends on whether there are holders before it and behind it.
    """
    sizes: dict[tuple[int, ...], int] = defaultdict(int)
    for tie in profile.ties:
        sizes[tie.layers] += tie.parameter_bytes
    repeated, borrowed, up, ups, down, downs = np.zeros((6, len(first)))
    for layers, size in sizes.items():
        inside = np.searchsorted(layers, stop) - np.searchsorted(layers, first)
        before = (inside > 0) & (layers[0] < first)
        behind = (inside > 0) & (layers[-1] >= stop)
        puts = before + (behind & ~before)
        gets = before.astype(np.int64) + behind
        repeated += size * np.maximum(inside - 1, 0)
        borrowed += size * before
        up, ups = up + size * puts, ups + puts
        down, downs = down + size * gets, downs + gets
    return Ties(
        repeated_bytes=repeated,
        borrowed_bytes=borrowed,
        upload_bytes=up,
        upload_objects=ups,
        download_bytes=down,
        download_objects=downs,
    )
