"""The files that a command writes: documents, pictures and trained models.

An output may replace what an earlier command of the same kind wrote, as compilers and converters do. But a document
replaces only a document of its own kind, and no output replaces a file that the command reads: a profile that was
measured in the cloud is not lost by a wrong name after -o. A model is written as safetensors or in torch's own format,
by the file's extension.
"""

import contextlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from funcpipe.cli.options import declared
from funcpipe.cli.verbs import Options
from funcpipe.errors import InputError

if TYPE_CHECKING:
    from funcpipe.training.state import StageState

SAFETENSORS, TORCH = ".safetensors", (".pt", ".pth")
DEFAULT = "model.safetensors"

_PICTURES = (".png", ".pdf", ".svg", ".jpg", ".jpeg", ".eps", ".ps", ".webp")


def check_outputs(options: Options) -> None:
    """Raise InputError, before any work is done, for a file that could not be written after it, or must not be."""
    given = [(one, getattr(options, one.name or "", None)) for one in declared(options.command)]
    named = [path for one, value in given if one.reads for path in (value if isinstance(value, tuple) else [value])]
    inputs = {os.path.realpath(path) for path in named if path is not None}
    written: dict[str, str] = {}
    for one, path in given:
        if one.writes is None or path is None:
            continue
        name, kind, place = str(one.name), one.writes, os.path.realpath(path)
        check_writable([path])
        if name == "figure" and not path.lower().endswith(_PICTURES):
            raise InputError(f"{path} cannot be drawn: its name must end with {', '.join(_PICTURES)}")
        if place in inputs and not (kind and _kind_of(path) == kind):  # which is no input
            raise InputError(f"{path} is read by this command and would be lost: write to another file")
        if place in written:
            raise InputError(f"{path} is named twice as an output: {written[place]} and {name}")
        written[place] = name
        _check_replaced(path, kind)


def write_file(write_to: Callable[[str], object], path: str) -> None:
    """Let `write_to` write the file `path`; raises InputError where it cannot.

    It has the permissions that it had before, or those of any new file of the user: some libraries write files that
    only their owner can read.
    """
    is_new = not os.path.exists(path)
    try:
        if is_new:
            open(path, "ab").close()
        before = os.stat(path)
        write_to(path)
        if stat.S_ISREG(before.st_mode) and os.stat(path).st_mode != before.st_mode:
            os.chmod(path, stat.S_IMODE(before.st_mode))
    except BaseException as error:  # an error, such as nothing to draw, leaves no empty file
        if is_new and not os.path.islink(path):
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)
        if isinstance(error, OSError | RuntimeError):  # torch.save raises RuntimeError
            raise InputError(f"{path} cannot be written: {error}") from error
        raise


def check_writable(paths: Iterable[str | None]) -> None:
    """Raise InputError, before any work is done, for a path that could not be written after it."""
    for path in paths:
        if path is None:
            continue
        if not path:
            raise InputError("the name of a file to write is empty: name one")
        folder = os.path.dirname(path) or "."
        if not os.path.isdir(folder):
            raise InputError(f"{path} cannot be written: there is no folder {folder}")
        if os.path.isdir(path) or not os.access(path if os.path.exists(path) else folder, os.W_OK):
            raise InputError(f"{path} cannot be written: choose another place")


def _check_replaced(path: str, kind: str) -> None:
    """Raise InputError if the file that is there is of another kind than `kind`, or none and this is a document."""
    if not os.path.isfile(path) or os.path.getsize(path) == 0:
        return
    there = _kind_of(path)
    if (there or kind) and there != kind:
        is_now = f"a {there} of funcpipe" if there else f"no {kind} of funcpipe"
        raise InputError(
            f"{path} is there already, and is {is_now}: it is not replaced; delete it, or name another file"
        )


def _kind_of(path: str) -> str:
    """The kind of funcpipe document that the file is; empty if it is none."""
    if not os.path.isfile(path):
        return ""
    with open(path, "rb") as file:
        found = re.match(rb'\s*\{\s*"format":\s*"funcpipe\.([\w-]+)/', file.read(200))
    return found[1].decode() if found else ""


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


SHARD_BYTES = 1 << 30
"""About how large the files of a model in a folder are: one of them is in memory at a time."""


def is_folder(path: str | None) -> bool:
    """Return True if a model is written into a folder of that name: it has no extension."""
    return path is not None and not Path(path).suffix


def write_shards(state: Mapping[str, Any], folder: str, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a `state_dict` into `folder` as Hugging Face does: safetensors files and their index, one after another.

    Raises InputError if that fails, or if there are files in it.
    """
    if os.path.isdir(folder) and os.listdir(folder):
        raise InputError(f"{folder} is a folder with files in it; name another one for the model")
    try:
        _write_shards(state, shard_bytes, folder)
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error}") from error


def write_optimizer(state: "StageState", folder: str) -> None:
    """Write what the optimiser keeps into `folder`: tensors as `write_shards` does, all else into optimizer.json.

    Raises as that does, and as `StageState.optimizer_state_dict`, whose form it has.
    """
    tensors, others = state.optimizer_state_dict()
    write_shards(tensors, folder)
    write_file(partial(_write_json, others), os.path.join(folder, "optimizer.json"))


def _write_json(value: object, path: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)


def _write_shards(state: Mapping[str, Any], shard_bytes: int, folder: str) -> None:
    from funcpipe.comm.weight_files import NAMES, make_file
    from funcpipe.runstate.checkpoints import in_files

    os.makedirs(folder, exist_ok=True)
    paths: list[str] = []
    weight_map: dict[str, int] = {}
    total = 0
    for part in in_files(state, shard_bytes):
        for name, tensor in part.items():
            if tensor.dtype not in NAMES or not _is_storable(tensor):
                raise InputError(f"{folder} cannot hold {name!r}, a {tensor.dtype}: safetensors has no such value")
            total += tensor.nbytes
        weight_map |= dict.fromkeys(part, len(paths))
        paths.append(os.path.join(folder, f"{len(paths)}.part"))
        make_file(part)[0].write(paths[-1])
    names = [f"model-{number:05d}-of-{len(paths):05d}{SAFETENSORS}" for number in range(1, len(paths) + 1)]
    for path, name in zip(paths, names, strict=True):
        os.replace(path, os.path.join(folder, name))
    index = {"metadata": {"total_size": total}, "weight_map": {name: names[i] for name, i in weight_map.items()}}
    _write_json(index, os.path.join(folder, "model.safetensors.index.json"))


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
