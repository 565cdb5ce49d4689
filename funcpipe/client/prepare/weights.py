"""Weights of a model that lie in safetensors files: found, and matched with the model's tensors, by headers alone."""

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import torch
from torch import Tensor, nn

from funcpipe.comm.weight_files import StoredTensor, read_header
from funcpipe.errors import DataError, KeyMissing, ModelError, PlatformRefused
from funcpipe.model.deferred import Construction, Made
from funcpipe.model.graph.reachable import plain_attributes
from funcpipe.model.graph.values import first_few
from funcpipe.model.tensors import named_tensors
from funcpipe.model.weightless import Weightless
from funcpipe.platforms.base import Storage
from funcpipe.platforms.catalog import LOCAL, is_ray, open_storage
from funcpipe.runstate.base import StoredBase
from funcpipe.training.stage_job import StageWeights

_log = logging.getLogger(__name__)

WeightSource = str | Path | Sequence[str | Path]
"""Files of weights: a folder, a file or an index, by path or URL; or several files."""

_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True)
class ModelWeights:
    """The tensors of a model by its names for them: those that lie in files, and those that its constructor makes."""

    stored: Mapping[str, StoredTensor]
    made: Mapping[str, Made]

    def check_reachable(self, platform: str) -> None:
        """Raise PlatformRefused for files of this machine if the functions of `platform`, a URL, run in a cloud."""
        local = next((tensor.file for tensor in self.stored.values() if tensor.file.url.startswith("file:")), None)
        if local is not None and not is_ray(platform) and urlsplit(platform).scheme != LOCAL:
            raise PlatformRefused(
                f"the weights {local.place} lie on this machine, where the functions cannot read them; copy them to "
                "the run's object storage, and give that URL as weights"
            )


def weights_of(weights: ModelWeights | None, base: StoredBase, stages: Sequence[nn.Module]) -> StageWeights | None:
    """Those of `weights` and of `base` that any of `stages` holds; None if there are none."""
    names = {name for stage in stages for name, _ in _tensors(stage)}
    known = {} if weights is None else weights.stored
    stored = {name: tensor for name, tensor in {**known, **base.stored}.items() if name in names}
    made = {} if weights is None else {name: one for name, one in weights.made.items() if name in names - stored.keys()}
    return StageWeights(stored=stored, made=made, open_storage=open_storage) if stored or made else None


def open_model(factory: Callable[[], nn.Module], source: WeightSource) -> tuple[nn.Module, ModelWeights]:
    """The model that `factory` makes, without contents, and where these come from: the files of `source`, above all.

    Raises DataError for files that are missing or damaged, ModelError for weights of another model.
    """
    found, construction = find_weights(source), Construction()
    model = construction.run(factory)
    stored = match_weights(model, found)
    made = _empty(model, stored, construction)
    for module in model.modules():
        for name, value in plain_attributes(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                setattr(module, name, _made(construction, f"the attribute {name}", value).compute(0))
    return model, ModelWeights(stored=stored, made=made)


def _empty(model: nn.Module, stored: Mapping[str, StoredTensor], construction: Construction) -> dict[str, Made]:
    """Take the tensors of `model` from the meta device, still without contents; return those that are not `stored`."""
    made: dict[str, Made] = {}
    emptied: dict[int, Tensor] = {}
    mode, named = Weightless(), list(_tensors(model))
    for name, tensor in named:
        if not tensor.is_meta:
            continue
        if name in stored:
            tensor.data = tensor.data.to(stored[name].dtype)
        else:
            made[name] = _made(construction, name, tensor)
        if id(tensor) not in emptied:
            emptied[id(tensor)] = mode.empty(tensor, name)
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for name, held in own.items():
                own[name] = emptied.get(id(held), held)  # type: ignore[assignment]
    return made


def _tensors(module: nn.Module) -> tuple[tuple[str, Tensor], ...]:
    return (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))


def _made(construction: Construction, name: str, tensor: Tensor) -> Made:
    found = construction.made(tensor)
    if found is None:
        raise ModelError(
            f"{name} is in no file of weights, and the function that makes the model leaves it without contents; add "
            "it to the files, or initialise it there with torch's operators"
        )
    return found


def find_weights(source: WeightSource) -> dict[str, StoredTensor]:
    """The tensors in the files of `source`, by name. Raises DataError for files that are missing or damaged."""
    sources = [source] if isinstance(source, str | Path) else list(source)
    found: dict[str, StoredTensor] = {}
    for url, key in dict.fromkeys(place for one in sources for place in _files(str(one))):
        for name, tensor in read_header(open_storage(url), url, key).items():
            if name in found:
                raise DataError(f"{name} is in two files, {found[name].file.place} and {tensor.file.place}; give one")
            found[name] = tensor
    if not found:
        raise DataError(f"there are no tensors in {source}; give a folder of safetensors files, or such a file")
    return found


def _files(source: str) -> Iterable[tuple[str, str]]:
    """The files of one source: the URL of the storage of each, and its key."""
    path = Path(source)
    if not urlsplit(source).scheme:
        if not path.exists():
            raise DataError(f"there is no file or folder of weights {source}; give one that is there, or a URL")
        folder, name = (path, "") if path.is_dir() else (path.parent, path.name)
        return [_resolved(folder / key) for key in _keys(open_storage(folder.resolve().as_uri()), name, source)]
    parts = urlsplit(source)
    folder_path, _, name = (
        parts.path.rpartition("/")
        if parts.path.endswith((".safetensors", ".json"))
        else (*(parts.path.rstrip("/"), "", ""),)
    )
    url = urlunsplit(parts._replace(path=folder_path))
    return [(url, key) for key in _keys(open_storage(url), name, source)]


def _resolved(path: Path) -> tuple[str, str]:
    """A local file, which may be a link, as in the cache of Hugging Face's hub."""
    real = path.resolve()
    return real.parent.as_uri(), real.name


def _keys(storage: Storage, name: str, source: str) -> list[str]:
    """The files in a folder, by its index if it has one; or the file `name` alone, or those of the index `name`."""
    if name.endswith(".safetensors"):
        return [name]
    try:
        index = json.loads(storage.get(name or _INDEX))
        return sorted(set(index["weight_map"].values()))
    except KeyMissing:
        found = [key for key in storage.list("") if key.endswith(".safetensors") and "/" not in key]
        if name or not found:
            raise DataError(f"there are no files of weights in {source}; give a folder of safetensors files") from None
        return found
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise DataError(f"{name or _INDEX} of {source} is no index of safetensors files: {error}") from error


def match_weights(model: nn.Module, found: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of `model` that are among those `found`, by its names; each of the names of a tied one may be.

    Raises ModelError for tensors of other shapes or kinds of numbers, and for those that the model does not have.
    """
    own = named_tensors(model)
    names: dict[int, list[str]] = {}
    for name, tensor in own.items():
        names.setdefault(id(tensor), []).append(name)
    stored: dict[str, StoredTensor] = {}
    for tied in names.values():
        places = [found[inside] for name in tied if (inside := _name_in(found, name)) is not None]
        stored |= dict.fromkeys(tied, places[0]) if places else {}
    _check_names(model, found, own, stored)
    for name, place in stored.items():
        _check_form(name, own[name], place)
    missing = [name for name in own if name not in stored]
    if missing:
        _log.info("%d tensors are in no file of weights, and are initialised: %s", len(missing), first_few(missing))
    return stored


def _name_in(found: Mapping[str, StoredTensor], name: str) -> str | None:
    """The name that files have for the model's tensor `name`: the same, or that without the wrappers of peft."""
    if name in found:
        return name
    inner = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
    return inner if inner in found else None


def _check_names(
    model: nn.Module, found: Mapping[str, StoredTensor], own: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]
) -> None:
    used = {_name_in(found, name) for name in own}
    transient = {name for name, _ in model.named_buffers(remove_duplicate=False)} - own.keys()
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    unexpected = [
        name
        for name in found
        if name not in used and name not in transient and not any(pattern.search(name) for pattern in ignored)
    ]
    if unexpected:
        absent = [name for name in own if name not in stored]
        lacks = f", and the files lack {first_few(absent)}" if absent else ""
        raise ModelError(
            f"{type(model).__name__} has no {first_few(unexpected)}, which are in the files of weights{lacks}; "
            "make the model that the weights are of, or write them under its names"
        )


def _check_form(name: str, own: Tensor, stored: StoredTensor) -> None:
    if tuple(own.shape) != stored.shape:
        raise ModelError(
            f"{name} has shape {list(own.shape)}, and {list(stored.shape)} in {stored.file.place}; make the model that "
            "the weights are of"
        )
    if own.dtype is stored.dtype or (own.dtype is torch.float32 and stored.dtype.is_floating_point):
        return
    raise ModelError(
        f"{name} is of {own.dtype}, and of {stored.dtype} in {stored.file.place}; let the function make it of that "
        "(with torch.float32, torch's default, it takes what the file has), or write the file anew"
    )
