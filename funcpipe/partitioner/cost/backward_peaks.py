"""What the backward of a stage needs of a device beyond the activations that it began with.

A backward comes to the last layer first. At layer i it holds the activations of the layers up to i, the gradients of
the values that these have sent and later ones have read, those that the layer makes of what it has read, and its
workspace. So long as a parameter has no gradient, it is made there. By hand, two layers of one stage, in MB:

                                   of the first      of the last
    activations                          50                30
    parameters                            2                 8
    workspace                            20                 5
    gradients of what it sends           15                 0
    gradients of what it reads            0                15
    beyond the 80 of both         20 + 15 - 30            5 + 15        the most: 20, `beyond_bytes`
    with gradients that it made    5 + 8                  20            the most: 20, `making_bytes`
"""

from typing import NamedTuple

import numpy as np

from funcpipe.core import ModelProfile
from funcpipe.partitioner.cost import Array, IntArray


class BackwardPeaks(NamedTuple):
    """For each stage the most bytes that a backward holds beyond the activations of one micro-batch: where parameters
    have gradients, to which it adds, and where it makes them.
    """

    beyond_bytes: Array
    making_bytes: Array


def backward_peaks(first: IntArray, stop: IntArray, profile: ModelProfile) -> BackwardPeaks:
    """Return those of the stages [first, stop), an element each.

    What depends on the end of a stage alone is a sum over layers, so a stage's maximum is that over its layers of
    numbers that do not depend on the stage.
    """
    layers = profile.layers
    kept, parameters, workspace = (
        np.array(column, dtype=np.float64)
        for column in zip(
            *((layer.kept_on_device_bytes, layer.parameter_bytes, layer.workspace_bytes) for layer in layers),
            strict=True,
        )
    )
    kept_upto, parameters_upto = kept.cumsum(), parameters.cumsum()
    held = workspace + gradients_bytes(profile) + kept_upto
    made = gradients_bytes(profile) + kept_upto - parameters_upto + np.maximum(workspace, parameters - kept)
    last = stop - 1
    return BackwardPeaks(
        beyond_bytes=_most(held, first, stop) - kept_upto[last],
        making_bytes=_most(made, first, stop) - kept_upto[last] + parameters_upto[last],
    )


def gradients_bytes(profile: ModelProfile) -> Array:
    """Return for each layer the bytes of the gradients of values while its backward runs: of those that it, or a layer
    before it, has made and a layer behind it reads, and of those that it reads itself.
    """
    total = np.zeros(len(profile.layers))
    for tensor in profile.tensors:
        total[tensor.producer : tensor.consumers[-1]] += tensor.backward_bytes
        total[list(tensor.consumers)] += tensor.backward_bytes
    return total


def most_workspace_bytes(first: IntArray, stop: IntArray, profile: ModelProfile) -> Array:
    """Return the largest workspace of the layers of each stage [first, stop)."""
    return _most(np.array([layer.workspace_bytes for layer in profile.layers], dtype=np.float64), first, stop)


def _most(values: Array, first: IntArray, stop: IntArray) -> Array:
    """Return the largest of `values` in each range."""
    table = np.array([np.pad(np.maximum.accumulate(values[start:]), (start, 0)) for start in range(len(values))])
    found: Array = table[first, stop - 1]
    return found
