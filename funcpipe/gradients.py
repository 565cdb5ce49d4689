"""The gradients of a stage as one flat vector, which its replicas sum.

The vector holds the gradients of all trainable parameters in order, then extra tensors to be summed alike, then one
mark for each parameter: how many replicas had a gradient for it. A parameter without one anywhere keeps `grad = None`,
as in a single process, where optimisers pass over it.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from funcpipe.comm.blocks import block
from funcpipe.norms import sum_of_squares


class FlatGradient:
    """The vector of one replica and one step."""

    def __init__(self, parameters: Sequence[nn.Parameter], extras: Sequence[Tensor]) -> None:
        self._parameters = tuple(parameters)
        self._places = _places(self._parameters)
        self._extras = tuple(extras)
        self._flat = _flatten(self._parameters, self._extras)
        for parameter in self._parameters:
            parameter.grad = None  # the flat vector holds it now

    @property
    def vector(self) -> Tensor:
        """The vector, to be summed over the replicas in its place."""
        return self._flat

    def squares(self) -> float:
        """The sum of the squares of all gradients, of the summed vector."""
        return sum_of_squares([self._flat[: sum(parameter.numel() for parameter in self._parameters)]])

    def summed(self, parameter: nn.Parameter) -> Tensor | None:
        """The gradient of `parameter` in the summed vector, a view of it; None if no replica has one."""
        number, offset = self._places[id(parameter)]
        mark = self._flat[self._flat.numel() - len(self._parameters) + number]
        values = self._flat[offset : offset + parameter.numel()]
        return values.view_as(parameter).to(parameter.dtype) if mark else None

    def unpack(self) -> tuple[Tensor, ...]:
        """Give every parameter its summed gradient; returns the summed extras."""
        for parameter in self._parameters:
            parameter.grad = self.summed(parameter)
        offset = sum(parameter.numel() for parameter in self._parameters)
        extras = []
        for extra in self._extras:
            extras.append(self._flat[offset : offset + extra.numel()].view_as(extra).to(extra.dtype))
            offset += extra.numel()
        return tuple(extras)


def _places(parameters: Sequence[nn.Parameter]) -> dict[int, tuple[int, int]]:
    """The number of each parameter, and where its gradient begins, by identity."""
    starts = itertools.accumulate((parameter.numel() for parameter in parameters), initial=0)
    return {id(parameter): (i, start) for i, (parameter, start) in enumerate(zip(parameters, starts, strict=False))}


def _flatten(parameters: Sequence[nn.Parameter], extras: Sequence[Tensor]) -> Tensor:
    """The vector; the parameters' own gradients are freed one by one as they are copied."""
    dtypes = {tensor.dtype for tensor in (*parameters, *extras)}
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    length = sum(tensor.numel() for tensor in (*parameters, *extras)) + len(parameters)
    flat = block(length * dtype.itemsize).view(dtype).zero_()
    offset = 0
    marks = torch.tensor([float(parameter.grad is not None) for parameter in parameters])
    for parameter in parameters:
        if parameter.grad is not None:
            flat[offset : offset + parameter.numel()].copy_(parameter.grad.reshape(-1))
            parameter.grad = None
        offset += parameter.numel()
    for extra in extras:
        flat[offset : offset + extra.numel()].copy_(extra.reshape(-1))
        offset += extra.numel()
    flat[offset:].copy_(marks)
    return flat
