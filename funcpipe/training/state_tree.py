"""An optimiser's nested state as plain JSON, with its tensors kept apart under names of their own.

Checkpoints hold tensors in safetensors files and everything else as JSON, so nothing read from storage is unpickled.
`split_tensors({"step": 3, "exp_avg": t}, "optimizer/w", tensors)` gives

    {"dict": {"step": 3, "exp_avg": {"tensor": "optimizer/w/exp_avg"}}}

and puts `t` into `tensors` under "optimizer/w/exp_avg"; `join_tensors` is the inverse.
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from funcpipe.errors import ModelError


def split_tensors(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return `value` as JSON data; its tensors go into `tensors`, under `name` and their place in `value`.

    Raises ModelError for anything that is neither a tensor nor plain data.
    """
    if isinstance(value, Tensor):
        tensors[name] = value.detach()
        return {"tensor": name}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value) in (dict, OrderedDict, defaultdict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: split_tensors(item, f"{name}/{key}", tensors) for key, item in value.items()}}
    if type(value) in (list, tuple):
        items = [split_tensors(item, f"{name}/{i}", tensors) for i, item in enumerate(value)]
        return {type(value).__name__: items}
    if type(value) in (dict, Counter) and all(isinstance(key, int | float | str) for key in value):
        pairs = [[key, split_tensors(item, f"{name}/{i}", tensors)] for i, (key, item) in enumerate(value.items())]
        return {"pairs" if type(value) is dict else "counter": pairs}
    owner = name.partition("/")[0].replace("optimizer", "optimiser")
    raise ModelError(
        f"the {owner} keeps a {type(value).__name__} ({name}), which a checkpoint cannot hold: only tensors, numbers, "
        "strings, lists, tuples, counters and dictionaries of these can be saved; keep it elsewhere, or leave it out "
        "of the state"
    )


def join_tensors(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the inverse of `split_tensors`; tensors are copied."""
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    match kind:
        case "tensor":
            return tensors[content].clone()
        case "dict":
            return {key: join_tensors(item, tensors) for key, item in content.items()}
        case "list":
            return [join_tensors(item, tensors) for item in content]
        case "tuple":
            return tuple(join_tensors(item, tensors) for item in content)
        case "pairs":
            return {key: join_tensors(item, tensors) for key, item in content}
        case "counter":
            return Counter({key: join_tensors(item, tensors) for key, item in content})
        case _:
            raise TypeError(f"unknown kind {kind!r}")


def tensor_names_in(tree: Any) -> Iterator[str]:
    """Yield the names of the tensors that `tree` refers to."""
    if isinstance(tree, dict):
        if _is_reference(tree):
            yield tree["tensor"]
        else:
            yield from tensor_names_in(list(tree.values()))
    elif isinstance(tree, list):
        for item in tree:
            yield from tensor_names_in(item)


def rename_tensors(tree: Any, names: Mapping[str, str]) -> Any:
    """Return `tree` referring to its tensors by new names: `names` maps old to new, what it lacks keeps its name."""
    if isinstance(tree, list):
        return [rename_tensors(item, names) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if _is_reference(tree):
        return {"tensor": names.get(tree["tensor"], tree["tensor"])}
    return {key: rename_tensors(item, names) for key, item in tree.items()}


def _is_reference(tree: Mapping[str, Any]) -> bool:
    return tree.keys() == {"tensor"} and isinstance(tree["tensor"], str)
