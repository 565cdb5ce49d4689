"""Find the values that one layer computes and later ones read."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx

from funcpipe.model.graph.observe import NodeRecord, TensorFacts
from funcpipe.model.graph.program import is_number
from funcpipe.model.graph.values import Crossing, Layer, Value


def crossings_of(
    layers: Sequence[Layer], outputs: Sequence[Any], records: Mapping[str, NodeRecord]
) -> tuple[tuple[Crossing, ...], tuple[Value, ...]]:
    """The nodes that later layers read, and a Value for each tensor or number among their leaves.

    The last layer counts as a reader of the model's outputs.
    """
    readers = _readers(layers, outputs)
    names = _UniqueNames()
    crossings, values = [], []
    for i, layer in enumerate(layers):
        for node in layer.nodes:
            consumers = tuple(reader for reader in readers.get(node.name, ()) if reader > i)
            if node.meta.get("replicated") or not consumers:
                continue
            base = names.new(layer.name if node.op == "call_module" else node.name)
            crossing, made = _crossing(base, node.name, (i, consumers), records[node.name])
            crossings.append(crossing)
            values += made
    return tuple(crossings), tuple(values)


def _readers(layers: Sequence[Layer], outputs: Sequence[Any]) -> dict[str, list[int]]:
    """The layers that read each node's value, in ascending order."""
    readers: dict[str, dict[int, None]] = {}
    for i, layer in enumerate(layers):
        for node in layer.nodes:
            for used in node.all_input_nodes:
                readers.setdefault(used.name, {})[i] = None
    for node in outputs:
        if isinstance(node, torch.fx.Node):
            readers.setdefault(node.name, {})[len(layers) - 1] = None
    return {name: list(found) for name, found in readers.items()}


def _crossing(
    base: str, node: str, ends: tuple[int, tuple[int, ...]], record: NodeRecord
) -> tuple[Crossing, list[Value]]:
    producer, consumers = ends
    values = []
    names: list[str | None] = []
    constants: list[object] = []
    for path, leaf in zip(record.tree.paths(base), record.leaves, strict=True):
        scalar = is_number(leaf)
        moves = scalar or isinstance(leaf, TensorFacts)
        names.append(path if moves else None)
        constants.append(None if moves else leaf)
        if moves:
            facts = TensorFacts((), (), torch.tensor(leaf).dtype, False) if scalar else leaf
            value = Value(
                path,
                producer,
                consumers,
                facts.requires_grad,
                facts.shape,
                facts.dtype,
                facts.stride,
                facts.symbols,
                scalar,
            )
            values.append(value)
    return Crossing(node, producer, consumers, record.tree, tuple(names), tuple(constants)), values


class _UniqueNames:
    """Gives out unique names."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def new(self, name: str) -> str:
        number = 2
        unique = name
        while unique in self._taken:
            unique, number = f"{name}:{number}", number + 1
        self._taken.add(unique)
        return unique
