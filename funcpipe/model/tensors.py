"""A model's parameters and buffers by name: read, written back, and in the form of the model's own `state_dict`."""

import copy
import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and persistent buffers of `model`, a tied one under each of its names.

    These are the entries of its `state_dict`, unless its modules say otherwise.
    """
    transient = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in (*module._non_persistent_buffers_set, *_constants(module))
    }
    buffers = {name: t for name, t in model.named_buffers(remove_duplicate=False) if name not in transient}
    return {**dict(model.named_parameters(remove_duplicate=False)), **buffers}


def is_dense(tensor: Tensor) -> bool:
    """Whether `tensor` is an array of its elements, which alone can be saved and sent."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def _constants(module: nn.Module) -> list[str]:
    """The buffers of `module` that are constants of traced code, which torch.export keeps in modules of its own."""
    if not isinstance(module, torch.fx.GraphModule):
        return []
    return [name for name in module._buffers if name.startswith("_tensor_constant")]


def load_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy `tensors` into the parameters and buffers of `model` that have their names; others stay as they are."""
    own = named_tensors(model)
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


def saved_state(model: nn.Module) -> dict[str, Any]:
    """A copy of the `state_dict` of `model`, in which tied tensors are still one."""
    return copy.deepcopy(dict(model.state_dict()))


def digest(tensor: Tensor) -> Any:
    """A short form of what `tensor` holds, to see whether it changes: its dtype, its shape and a checksum."""
    form = tensor.dtype, tuple(tensor.shape)
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return (*form, repr(tensor))
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    return (*form, zlib.crc32(plain.reshape(-1).view(torch.uint8).numpy().data))
