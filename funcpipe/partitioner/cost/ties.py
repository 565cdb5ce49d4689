"""What stages have of parameters that layers of other stages use as well, from their borders alone."""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from funcpipe.core import ModelProfile

Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ties:
    """What stages have of parameters that several layers use.

    `repeated_bytes` counts again and again what one stage holds once; `borrowed_bytes` are summed over the replicas by
    an earlier stage; the rest is what one function sends and reads of their gradients in an iteration.
    """

    repeated_bytes: Array
    borrowed_bytes: Array
    upload_bytes: Array
    upload_objects: Array
    download_bytes: Array
    download_objects: Array


def stage_ties(first: IntArray, stop: IntArray, profile: ModelProfile) -> Ties:
    """For stages [first, stop), an element each.

    A gradient goes from holder to holder, the last one first, and the sum from the first holder to each of the others:
    whether a stage takes part in each step follows from there being holders before it or behind it.
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
