"""The files of a checkpoint: tensors in the format of safetensors, each file with as many as it has room for."""

from collections.abc import Iterator, Mapping

import safetensors.torch
import torch
from torch import Tensor

from funcpipe.errors import CorruptMessage, ModelError

_PAIRS = "complex128:"
"""The prefix of tensors that are saved as pairs of real numbers, for which safetensors has no dtype."""


def in_files(tensors: Mapping[str, Tensor], file_bytes: int) -> Iterator[dict[str, Tensor]]:
    """`tensors`, in order, as the files of a checkpoint hold them: each up to `file_bytes`, or with one tensor."""
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if part and size + tensor.nbytes > file_bytes:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += tensor.nbytes
    if part:
        yield part


def serialised(tensors: Mapping[str, Tensor]) -> bytes:
    """Return `tensors` as a file. Raises ModelError for those that safetensors cannot hold."""
    stored = dict(_storable(name, tensor) for name, tensor in tensors.items())
    owners = {tensor.untyped_storage().data_ptr(): name for name, tensor in stored.items()}
    for name, tensor in stored.items():  # safetensors refuses two tensors in the same memory
        if owners[tensor.untyped_storage().data_ptr()] != name:
            stored[name] = tensor.clone()
    try:
        return safetensors.torch.save(stored)
    except (ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"a checkpoint cannot hold the tensors {sorted(tensors)}: {error}") from error


def _storable(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    if tensor.dtype is torch.complex128:
        return _PAIRS + name, _unshared(torch.view_as_real(tensor.resolve_conj()))
    return name, _unshared(tensor)


def _loaded(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    if name.startswith(_PAIRS):
        return name.removeprefix(_PAIRS), torch.view_as_complex(tensor)
    return name, tensor


def _unshared(tensor: Tensor) -> Tensor:
    """Return `tensor`, contiguous and in memory of its own, as safetensors demands."""
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)


def deserialised(key: str, data: bytes) -> dict[str, Tensor]:
    """Return the inverse of `serialised`; raises CorruptMessage, which names `key`, for anything else."""
    try:
        return dict(_loaded(name, tensor) for name, tensor in safetensors.torch.load(data).items())
    except (safetensors.SafetensorError, ValueError, KeyError, RuntimeError, TypeError) as error:
        raise CorruptMessage(f"{key} is no safetensors file: {error}") from error
