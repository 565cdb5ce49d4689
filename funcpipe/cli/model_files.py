"""The file that a trained model is written to: safetensors or torch's own format, by its extension."""

import os
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from funcpipe.cli.files import check_writable, write_file
from funcpipe.errors import InputError

SAFETENSORS, TORCH = ".safetensors", (".pt", ".pth")
DEFAULT = "model.safetensors"


def check_model_file(path: str | None) -> None:
    """Raise InputError for a file that no model is written to: by its extension, or because the place is not there."""
    if path is None:
        return
    if Path(path).suffix not in (SAFETENSORS, *TORCH):
        raise InputError(
            f"{path} has no extension that says how a model is written: choose {SAFETENSORS}, or .pt or .pth for "
            "what torch.load reads"
        )
    check_writable([path])


def free_model_file() -> str:
    """The default file for a model in the current folder: model.safetensors, or, where that exists, one with a number.

    Raises InputError if nothing can be written there.
    """
    stem, extension = os.path.splitext(DEFAULT)
    names = (DEFAULT if number == 1 else f"{stem}-{number}{extension}" for number in count(1))
    path = next(name for name in names if not os.path.lexists(name))
    check_writable([path])
    return path


def check_holds(path: str, state: Mapping[str, Any]) -> None:
    """Raise InputError if the file `path` cannot hold a `state_dict`: safetensors has dense tensors alone."""
    if Path(path).suffix != SAFETENSORS:
        return
    for name, value in state.items():
        if not _is_storable(value):
            kind = getattr(value, "dtype", None) or type(value).__name__
            raise InputError(f"{path} cannot hold {name!r}, a {kind}: safetensors has no such value; use -o model.pt")


def write_model(state: Mapping[str, Any], path: str) -> None:
    """Write a `state_dict` to `path`, whole or not at all. Raises InputError if that fails.

    Tied tensors are written under each of their names, so that `load_state_dict(load_file(path))` finds them all.
    """
    import safetensors.torch
    import torch

    write_to: Callable[[str], object] = partial(torch.save, dict(state))
    if Path(path).suffix == SAFETENSORS:
        tensors = {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}
        write_to = partial(safetensors.torch.save_file, tensors, metadata={"format": "pt"})
    partly = f"{path}.part"
    write_file(write_to, partly)
    write_file(partial(os.replace, partly), path)


def write_somewhere(state: Mapping[str, Any], path: str, run: str) -> None:
    """Write what `run` has learned to `path`. If that fails, write it among temporary files, and raise InputError."""
    try:
        write_model(state, path)
    except InputError as error:
        elsewhere = os.path.join(tempfile.gettempdir(), f"{run}.pt")
        write_model(state, elsewhere)
        raise InputError(f"{error}; the trained model is in {elsewhere}") from error


def _is_storable(value: Any) -> bool:
    import safetensors.torch
    import torch

    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_quantized:
        return False
    try:
        safetensors.torch.save({"value": torch.empty(0, dtype=value.dtype)})
    except (ValueError, KeyError, RuntimeError):
        return False
    return True
