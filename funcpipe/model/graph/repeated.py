"""Repeated blocks: a model without weights is traced with three blocks of each kind, and its graph made whole again.

    model    embed, block 0, 1, 2, 3, …, 79, head        children of a list that are of one kind
    traced   embed, block 0, 1, 2,           head
    graph    embed, block 0, 1, 2, 2, …, 2,  head        with the modules and weights of blocks 3 to 79

Block 2 must call what block 1 calls, on its own weights and on what block 1 has made where that takes what block 0 has
made. Then one forward and backward of all blocks must have the fingerprints that the graph has: `tracing` sees to that.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from funcpipe.model.graph.observations import NodeRecord
from funcpipe.model.graph.program import attribute, is_inside, map_leaves
from funcpipe.model.graph.tracers import RecordedModule, Traced

_KEPT = 3
"""The blocks of a kind that are traced."""

Records = list[dict[str, NodeRecord]]


@dataclass(frozen=True)
class RepeatedBlocks:
    """A list of modules at `path`, of which those from `first` on, up to `count`, are of one kind."""

    path: str
    first: int
    count: int

    def number_of(self, path: str) -> int | None:
        """The number, of this list, of the module that the one at `path` is or lies in."""
        if not path.startswith(f"{self.path}."):
            return None
        return int(path[len(self.path) + 1 :].partition(".")[0])

    def renamed(self, item: Any, number: int, new: int) -> Any:
        """The path `item`, in block `new` instead of block `number`, or with a mark in place of a negative one."""
        block = f"{self.path}.{number}"
        if not isinstance(item, str) or not is_inside(item, block):
            return item
        return f"{self.path}.{new if new >= 0 else '#'}{item[len(block) :]}"


def repeated_blocks(model: nn.Module) -> tuple[RepeatedBlocks, ...]:
    """The outermost lists of `model` that end in at least twice as many blocks of one kind as need be traced."""
    found: list[RepeatedBlocks] = []
    for path, module in model.named_modules():
        names = list(module._modules)
        if not path or not isinstance(module, nn.ModuleList | nn.Sequential) or names != _numbers(len(names)):
            continue
        if any(is_inside(path, outer.path) for outer in found):
            continue
        kinds = [module_kind(child, with_integers=False) for child in module]
        first = next((i + 1 for i in reversed(range(len(kinds))) if kinds[i] != kinds[-1]), 0)
        if len(kinds) - first >= 2 * _KEPT:
            found.append(RepeatedBlocks(path, first, len(kinds)))
    return tuple(found)


def _numbers(count: int) -> list[str]:
    return [str(number) for number in range(count)]


@contextlib.contextmanager
def shortened(model: nn.Module, lists: Sequence[RepeatedBlocks]) -> Iterator[None]:
    """Leave the first three blocks of each kind alone in the model, within this context."""
    held = [(model.get_submodule(one.path), one) for one in lists]
    before = [(module, module._modules) for module, _ in held]
    for module, one in held:
        module._modules = {name: module._modules[name] for name in _numbers(one.first + _KEPT)}
    try:
        yield
    finally:
        for module, modules in before:
            module._modules = modules


def made_whole(
    traced: Traced, runs: Records, model: nn.Module, lists: Sequence[RepeatedBlocks]
) -> tuple[Traced, Records] | None:
    """The graph of the shortened `model`, with the records of its nodes in `runs`, with all blocks; None if blocks do
    not follow each other in one way.
    """
    for one in lists:
        segments = _segments(traced, one)
        if segments is None or not _are_alike(segments, one, runs):
            return None
        whole = _Whole(traced, runs, model, one, segments).made()
        if whole is None:
            return None
        traced, runs = whole
    return traced, runs


Segments = tuple[list[torch.fx.Node], list[torch.fx.Node], list[torch.fx.Node]]
"""The nodes of the three blocks, each with what code around it calls before the next one begins."""


def _segments(traced: Traced, one: RepeatedBlocks) -> Segments | None:
    nodes = [node for node in traced.module.graph.nodes if node.op != "output"]
    numbers: list[int | None] = [None] * len(nodes)
    for i in reversed(range(len(nodes))):
        path = _path(nodes[i])
        follows = path is None and nodes[i].op != "placeholder" and i + 1 < len(nodes)  # made for the next node
        numbers[i] = numbers[i + 1] if follows else one.number_of(path or "")
    wanted = range(one.first, one.first + _KEPT)
    if any(number not in numbers for number in wanted):
        return None
    starts = [numbers.index(number) for number in wanted]
    size = starts[2] - starts[1]
    end = starts[2] + size
    if size <= 0 or starts[1] - starts[0] != size or any(number is not None for number in numbers[end:]):
        return None
    first, second, third = (nodes[start : start + size] for start in starts)
    return first, second, third


def _path(node: torch.fx.Node) -> str | None:
    """The path of the module that a node calls, or whose code has made it; None if no code has."""
    if node.op in ("call_module", "get_attr"):
        return str(node.target)
    return node.meta.get("path")


def _are_alike(segments: Segments, one: RepeatedBlocks, runs: Records) -> bool:
    """Return whether the third block does what the second does, one block later."""
    first, second, third = segments
    ours = [_form(node, one, one.first + 1, first, second) for node in second]
    theirs = [_form(node, one, one.first + 2, second, third) for node in third]
    pairs = list(zip(second, third, strict=True))
    return ours == theirs and all(run[a.name].leaves == run[b.name].leaves for run in runs for a, b in pairs)


def _form(
    node: torch.fx.Node,
    one: RepeatedBlocks,
    number: int,
    previous: Sequence[torch.fx.Node],
    own: Sequence[torch.fx.Node],
) -> Any:
    """What `node` calls, in a form that equal blocks share."""
    places = {item: ("previous", i) for i, item in enumerate(previous)} | {
        item: ("own", i) for i, item in enumerate(own)
    }

    def leaf(item: Any) -> Any:
        if isinstance(item, torch.fx.Node):
            return places.get(item, item)
        return type(item), one.renamed(item, number, -1)

    call = node.meta.get("call")
    scopes = (
        node.meta.get("no_grad"),
        node.meta.get("autocast"),
        call and [one.renamed(item, number, -1) for item in call],
    )
    return node.op, one.renamed(node.target, number, -1), map_leaves((node.args, dict(node.kwargs)), leaf), scopes


class _Whole:
    """Copies a graph, and its third block as often as there are more; and the records of its nodes."""

    def __init__(
        self, traced: Traced, runs: Records, model: nn.Module, one: RepeatedBlocks, segments: Segments
    ) -> None:
        self._traced, self._runs, self._model, self._one = traced, runs, model, one
        self._segments = segments
        self._graph = torch.fx.Graph()
        self._new: dict[torch.fx.Node, torch.fx.Node] = {}  # of what is copied once, and of the third block the latest
        self._found: Records = [{} for _ in runs]

    def made(self) -> tuple[Traced, Records] | None:
        """The whole graph; None if what follows the blocks reads more than what the last one has made."""
        _, second, third = self._segments
        inner = {node for segment in self._segments[:2] for node in segment}
        *nodes, output = self._traced.module.graph.nodes
        end = nodes.index(third[-1]) + 1
        after = nodes[end:]
        read = {used for node in after for used in node.all_input_nodes} | set(_nodes_in(self._traced.outputs))
        if not inner.isdisjoint(read):
            return None
        for node in nodes[:end]:
            self._copy(node, self._one.first + 2)
        for number in range(self._one.first + _KEPT, self._one.count):
            latest = [self._new[node] for node in third]
            self._new |= dict(zip(second, latest, strict=True))
            for node in third:
                self._copy(node, number)
        for node in after:
            self._copy(node, self._one.first + 2)
        leaf = self._leaf(self._one.first + 2)
        self._graph.output(map_leaves(output.args[0], leaf))
        return replace(self._traced, module=self._module(), outputs=map_leaves(self._traced.outputs, leaf)), self._found

    def _copy(self, node: torch.fx.Node, number: int) -> None:
        """Add `node` of the third block as a node of block `number`, or any other as it is."""
        third = self._one.first + 2
        leaf = self._leaf(number)
        args, kwargs = map_leaves((node.args, dict(node.kwargs)), leaf)
        name = node.name if node.op == "placeholder" else None
        made = self._graph.create_node(node.op, leaf(node.target), args, kwargs, name=name)
        made.meta = {key: item for key, item in node.meta.items() if key != "examples"}
        for key in {"call", "asked"} & made.meta.keys():
            if made.meta[key]:
                made.meta[key] = tuple(self._one.renamed(item, third, number) for item in made.meta[key])
        self._new[node] = made
        for run, found in zip(self._runs, self._found, strict=True):
            if node.name in run:
                found[made.name] = self._renamed(run[node.name])

    def _renamed(self, record: NodeRecord) -> NodeRecord:
        if not record.changes and not record.freed:
            return record
        names = {old.name: new.name for old, new in self._new.items()}
        return replace(
            record,
            changes=tuple(names[name] for name in record.changes),
            returns=tuple(names[name] for name in record.returns),
            direct=tuple(names[name] for name in record.direct),
            freed=frozenset(names[name] for name in record.freed),
            differentiable=frozenset((names[name], i) for name, i in record.differentiable),
        )

    def _leaf(self, number: int) -> Callable[[Any], Any]:
        third = self._one.first + 2

        def changed(item: Any) -> Any:
            return self._new[item] if isinstance(item, torch.fx.Node) else self._one.renamed(item, third, number)

        return changed

    def _module(self) -> RecordedModule:
        known, root = self._traced.module, {}
        for node in self._graph.nodes:
            if node.op in ("call_module", "get_attr"):
                target = str(node.target)
                is_new = (self._one.number_of(target) or 0) >= self._one.first + _KEPT
                root[target] = attribute(self._model if is_new else known, target)
        return RecordedModule(root, self._graph, class_name=type(self._model).__name__)


def _nodes_in(value: Any) -> list[torch.fx.Node]:
    found: list[torch.fx.Node] = []
    map_leaves(value, lambda leaf: found.append(leaf) if isinstance(leaf, torch.fx.Node) else None)
    return found


def module_kind(module: nn.Module, *, with_integers: bool = True) -> Any:
    """Return the class, settings and tensors of a module and its children; other objects by identity.

    Without integers, blocks that know their number are of one kind.
    """
    kept = ("_parameters", "_buffers", "_modules")
    settings = {
        name: _setting(item)
        for name, item in sorted(vars(module).items())
        if name not in kept and (with_integers or type(item) is not int)
    }
    tensors = [(name, item_kind(item)) for own in (module._parameters, module._buffers) for name, item in own.items()]
    inner = [
        (name, child and module_kind(child, with_integers=with_integers)) for name, child in module._modules.items()
    ]
    return id(type(module)), settings, tensors, inner


def item_kind(item: Any) -> Any:
    """Return the type, shape and layout of a tensor; anything else in words."""
    if isinstance(item, Tensor):
        shared = isinstance(item, nn.Parameter)
        return str(item.dtype), tuple(item.shape), item.stride(), shared, shared and item.requires_grad
    return repr(item)


def _setting(item: Any) -> Any:
    if isinstance(item, bool | int | float | complex | str | bytes | type(None)):
        return item
    if isinstance(item, tuple | list | set | frozenset):
        return type(item).__name__, [_setting(part) for part in item]
    if isinstance(item, dict):
        return [(repr(key), _setting(part)) for key, part in item.items()]
    return item_kind(item) if isinstance(item, Tensor) else id(item)
