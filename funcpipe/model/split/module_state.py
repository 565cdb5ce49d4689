"""The Python attributes that a stage's forwards leave for the next ones: read, as plain data, and written back."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from funcpipe.errors import ModelError
from funcpipe.model.graph.program import attribute
from funcpipe.model.graph.reachable import plain_attributes
from funcpipe.model.split.plain_data import Decoder, Encoder, NotPlain
from funcpipe.model.split.stage import StageModule

Attributes = Mapping[str, Mapping[str, Any]]
"""The values of attributes, by the path of their module and by name."""

PREFIX = "state/"
"""What the names of tensors in attributes begin with."""


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
    """What `read_attributes` has read; raises LookupError, TypeError or ValueError for anything else."""
    found = {}
    for modules in states.values():
        decoder = Decoder(tensors)
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
            except NotPlain as reason:
                raise ModelError(
                    f"the forward of {path} ({type(module).__name__}) left {reason} in its attribute {name}, which "
                    "cannot be kept between micro-batches; keep numbers, strings and tensors without history"
                ) from reason
    return found


def _is_plain(value: Any) -> bool:
    """Whether `value` can be encoded."""
    try:
        Encoder("", {}).encode(value)
    except NotPlain:
        return False
    return True
