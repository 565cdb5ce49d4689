"""All names of each parameter and buffer: a tensor that a model holds under several is one tensor everywhere."""

from collections.abc import Collection, Mapping, Set

import torch
from torch import Tensor, nn

from funcpipe.errors import ModelError
from funcpipe.model.tensors import named_tensors


def tied_names(model: nn.Module, changed: Set[str]) -> tuple[tuple[str, ...], ...]:
    """The names of each tensor of `model` that has several; `changed` are the buffers that a forward changes.

    Raises ModelError for two tensors in the same memory: training one would change the other.
    """
    tensors = named_tensors(model)
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    first = {found[0]: tensors[found[0]] for found in names.values()}
    written = {
        name for name, tensor in first.items() if tensor.requires_grad or not changed.isdisjoint(names[id(tensor)])
    }
    _refuse_overlaps(first, written)
    return tuple(tuple(found) for found in names.values() if len(found) > 1)


def _refuse_overlaps(tensors: Mapping[str, Tensor], written: Collection[str]) -> None:
    starts = {name: t.data_ptr() for name, t in tensors.items() if t.numel() and t.layout is torch.strided}
    reached: list[str] = []  # tensors that may still reach into the one looked at
    for name in sorted(starts, key=starts.__getitem__):
        reached = [other for other in reached if starts[other] + _extent(tensors[other]) > starts[name]]
        for other in reached:
            if (name in written or other in written) and _overlap(tensors[name], tensors[other]):
                raise ModelError(
                    f"{other} and {name} are two tensors in the same memory, which stages cannot share; assign one "
                    "Parameter to both names, or keep one of them and compute the other in the forward"
                )
        reached.append(name)


def _extent(tensor: Tensor) -> int:
    """The bytes from the first to the last element."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors share an element, where the memory from first to last element overlaps."""
    if all(_extent(tensor) == tensor.nbytes for tensor in (one, other)):
        return True
    return bool(torch.isin(_addresses(one), _addresses(other)).any())


def _addresses(tensor: Tensor) -> Tensor:
    offsets = torch.zeros((), dtype=torch.long)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = offsets[..., None] + torch.arange(size) * stride
    return tensor.data_ptr() + offsets.reshape(-1) * tensor.element_size()
