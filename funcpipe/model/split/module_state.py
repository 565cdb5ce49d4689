"""The Python attributes that a stage's forwards leave for the next ones: read, as JSON and tensors, and written back.

    {"h": (t, None), "calls": 3}    ->    {"dict": [["h", {"tuple": [{"tensor": "state/0"}, null]}], ["calls", 3]]}

An object that is met again becomes {"again": n}, the nth of those so far: what was shared is shared afterwards.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.errors import ModelError
from funcpipe.model.graph.program import attribute
from funcpipe.model.graph.reachable import plain_attributes
from funcpipe.model.split.stage import StageModule


class _NotPlain(Exception):
    """A value that is none of numbers, strings, None, tensors, and lists, tuples, dicts, sets or deques of these."""


class Encoder:
    """Encodes several values that may share objects; their tensors go into `tensors`, by names that begin `prefix`."""

    def __init__(self, prefix: str, tensors: dict[str, Tensor]) -> None:
        self._prefix = prefix
        self._tensors = tensors
        self._numbers: dict[int, tuple[int, Any]] = {}

    def encode(self, value: Any) -> Any:
        """`value` as JSON data; raises _NotPlain."""
        if value is None or type(value) in (bool, int, float, str):
            return value
        if type(value) is complex:
            return {"complex": [value.real, value.imag]}
        if id(value) in self._numbers:
            return {"again": self._numbers[id(value)][0]}
        number = len(self._numbers)
        self._numbers[id(value)] = number, value
        if isinstance(value, Tensor):
            return {"tensor": self._tensor(value, number)}
        if type(value) is dict:
            return {"dict": [[self.encode(key), self.encode(item)] for key, item in value.items()]}
        if type(value) is deque:
            return {"deque": [value.maxlen, [self.encode(item) for item in value]]}
        if type(value) in _SEQUENCES.values():
            return {_NAMES[type(value)]: [self.encode(item) for item in value]}
        raise _NotPlain(f"a {type(value).__name__}")

    def _tensor(self, tensor: Tensor, number: int) -> str:
        if isinstance(tensor, nn.Parameter):
            raise _NotPlain("a parameter")
        if tensor.grad_fn is not None:
            raise _NotPlain("a tensor with its autograd history; keep value.detach()")
        name = f"{self._prefix}{number}"
        self._tensors[name] = tensor.detach()
        return name


class _Decoder:
    """The inverse of `Encoder`, for values in the same order; tensors are copied."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._made: list[Any] = []

    def decode(self, tree: Any) -> Any:
        """The value that `tree` stands for; raises LookupError, TypeError or ValueError if it stands for none."""
        if not isinstance(tree, dict):
            return tree
        ((kind, content),) = tree.items()
        if kind == "again":
            return self._made[content]
        if kind == "complex":
            return complex(*content)
        number = len(self._made)
        self._made.append(None)
        if kind == "tensor":
            self._made[number] = self._tensors[content].clone()
        elif kind == "tuple" or kind == "size" or kind == "set":
            self._made[number] = _SEQUENCES[kind]([self.decode(item) for item in content])
        else:
            self._made[number], fill = _empty(kind, content)
            fill(self.decode)
        return self._made[number]


_SEQUENCES: Mapping[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple, "set": set, "size": torch.Size}


_NAMES = {kind: name for name, kind in _SEQUENCES.items()}


def _empty(kind: str, content: Any) -> tuple[Any, Callable[[Callable[[Any], Any]], None]]:
    """An empty container, and what fills it: it may hold itself."""
    if kind == "list":
        made: list[Any] = []
        return made, lambda decode: made.extend(decode(item) for item in content)
    if kind == "dict":
        entries: dict[Any, Any] = {}
        return entries, lambda decode: entries.update((decode(key), decode(item)) for key, item in content)
    if kind == "deque":
        queue: deque[Any] = deque(maxlen=content[0])
        return queue, lambda decode: queue.extend(decode(item) for item in content[1])
    raise TypeError(f"unknown kind {kind!r}")


Attributes = Mapping[str, Mapping[str, Any]]
"""The values of attributes, by the path of their module and by name."""

PREFIX = "state/"
"""The beginning of the names of tensors in attributes."""


def read_attributes(
    root: nn.Module, blocks: Sequence[str], carried: Sequence[str], tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """The attributes of all modules in `blocks` that are plain data, as JSON by path; their tensors go into `tensors`.

    Raises ModelError if one of those that are `carried` is not plain.
    """
    found: dict[str, Any] = {}
    for block in blocks:
        encoder = Encoder(f"{PREFIX}{block}/", tensors)
        found[block] = [[path, _encoded(path, module, encoder, carried)] for path, module in _modules(root, block)]
    return found


def decode_attributes(states: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Attributes:
    """The attributes that `read_attributes` has read; raises LookupError, TypeError or ValueError for anything else."""
    found = {}
    for modules in states.values():
        decoder = _Decoder(tensors)
        for path, saved in modules:
            found[path] = {name: decoder.decode(tree) for name, tree in saved}
    return found


def write_attributes(root: nn.Module, attributes: Attributes) -> None:
    """Give the modules of `root` the `attributes` that were read; plain ones that are new since are removed.

    Raises AttributeError if they were read from another model.
    """
    for path, values in attributes.items():
        module = _module_at(root, path)
        for name in [name for name, value in plain_attributes(module).items() if _is_plain(value)]:
            if name not in values:
                del vars(module)[name]
        vars(module).update(values)


def _modules(root: nn.Module, block: str) -> Iterator[tuple[str, nn.Module]]:
    for path, module in _module_at(root, block).named_modules():
        yield f"{block}.{path}" if block and path else block or path, module


def _module_at(root: nn.Module, path: str) -> nn.Module:
    """The module at `path` of a model, or of a stage of it."""
    if not path:
        return root.whole_model() if isinstance(root, StageModule) else root
    module: nn.Module = attribute(root, path)
    return module


def _encoded(path: str, module: nn.Module, encoder: Encoder, carried: Sequence[str]) -> list[list[Any]]:
    found = []
    for name, value in plain_attributes(module).items():
        full = f"{path}.{name}" if path else name
        if full in carried or _is_plain(value):
            try:
                found.append([name, encoder.encode(value)])
            except _NotPlain as reason:
                raise ModelError(
                    f"the forward of {path} ({type(module).__name__}) left {reason} in its attribute {name}, which "
                    "cannot be kept between micro-batches; keep numbers, strings and tensors without history"
                ) from reason
    return found


def _is_plain(value: Any) -> bool:
    try:
        Encoder("", {}).encode(value)
    except _NotPlain:
        return False
    return True
