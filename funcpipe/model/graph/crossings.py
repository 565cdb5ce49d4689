"""What passes between layers: the values that one layer makes and later ones read."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx

from funcpipe.model.graph.observe import Facts, Seen
from funcpipe.model.graph.values import Crossing, Layer, Value


def crossings_of(
    layers: Sequence[Layer], outputs: Sequence[Any], seen: Mapping[str, Seen]
) -> tuple[tuple[Crossing, ...], tuple[Value, ...]]:
    """The nodes that are read in later layers than their own, and a value for each tensor or number among their leaves.

    The model's outputs are read by the last layer.
    """
    readers = _readers(layers, outputs)
    names = _Names()
    crossings, values = [], []
    for i, layer in enumerate(layers):
        for node in layer.nodes:
            consumers = tuple(reader for reader in readers.get(node.name, ()) if reader > i)
            if node.meta.get("free") or not consumers:
                continue
            base = names.new(layer.name if node.op == "call_module" else node.name)
            crossing, made = _crossing(base, node.name, (i, consumers), seen[node.name])
            crossings.append(crossing)
            values += made
    return tuple(crossings), tuple(values)


def _readers(layers: Sequence[Layer], outputs: Sequence[Any]) -> dict[str, list[int]]:
    """The layers that read each node's value, ascending."""
    readers: dict[str, dict[int, None]] = {}
    for i, layer in enumerate(layers):
        for node in layer.nodes:
            for used in node.all_input_nodes:
                readers.setdefault(used.name, {})[i] = None
    for node in outputs:
        if isinstance(node, torch.fx.Node):
            readers.setdefault(node.name, {})[len(layers) - 1] = None
    return {name: list(found) for name, found in readers.items()}


def _crossing(base: str, node: str, place: tuple[int, tuple[int, ...]], seen: Seen) -> tuple[Crossing, list[Value]]:
    producer, consumers = place
    values = []
    names: list[str | None] = []
    constants: list[object] = []
    for path, leaf in zip(seen.tree.paths(base), seen.leaves, strict=True):
        scalar = isinstance(leaf, int | float) and not isinstance(leaf, bool)
        moves = scalar or isinstance(leaf, Facts)
        names.append(path if moves else None)
        constants.append(None if moves else leaf)
        if moves:
            facts = Facts((), (), torch.tensor(leaf).dtype, False) if scalar else leaf
            value = Value(
                path,
                producer,
                consumers,
                facts.requires_grad,
                facts.shape,
                facts.dtype,
                facts.stride,
                facts.batched,
                scalar,
            )
            values.append(value)
    return Crossing(node, producer, consumers, seen.tree, tuple(names), tuple(constants)), values


class _Names:
    """Hands out names, each once."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def new(self, name: str) -> str:
        number = 2
        unique = name
        while unique in self._taken:
            unique, number = f"{name}:{number}", number + 1
        self._taken.add(unique)
        return unique
