"""What two runs for different batch sizes tell of a graph: the shapes for the sample, and numbers that follow the
batch size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx

from funcpipe.model.graph.eager_route import straight
from funcpipe.model.graph.observe import Facts, Seen
from funcpipe.model.graph.program import map_leaves
from funcpipe.model.graph.tree import LEAF

BATCH = "batch size"
"""What the placeholder of the batch size says in its meta under `input`."""


@dataclass(frozen=True)
class BatchDims:
    """The batch sizes of two runs, and that of the user's sample."""

    few: int
    many: int
    sample: int

    def line(self, few: float, many: float) -> tuple[float, float] | None:
        """The slope and offset of a number that is `few` in the one run and `many` in the other."""
        if self.few == self.many:
            return (0, few) if few == many else None
        slope = (many - few) / (self.many - self.few)
        if isinstance(few, int) and isinstance(many, int):
            if slope != int(slope):
                return None
            slope = int(slope)
        return slope, few - slope * self.few

    def at_sample(self, few: int, many: int) -> int:
        """A length for the sample's batch size, from what it is in the two runs."""
        line = self.line(few, many)
        return few if line is None else int(line[0] * self.sample + line[1])


def for_sample(one: Seen, two: Seen, batches: BatchDims) -> Seen:
    """What a node would have given for the sample."""
    if len(one.leaves) != len(two.leaves):
        return one
    leaves = []
    for few, many in zip(one.leaves, two.leaves, strict=True):
        if isinstance(few, Facts) and isinstance(many, Facts) and len(few.shape) == len(many.shape):
            shape = tuple(batches.at_sample(a, b) for a, b in zip(few.shape, many.shape, strict=True))
            batched = few.shape[:1] == (batches.few,) and many.shape[:1] == (batches.many,)
            leaves.append(replace(few, shape=shape, batched=batched and batches.few != batches.many))
        else:
            leaves.append(few)
    return replace(one, leaves=tuple(leaves))


def resolve_batch_dims(
    module: torch.fx.GraphModule, outputs: Sequence[Any], one: dict[str, Seen], two: dict[str, Seen], batches: BatchDims
) -> tuple[Any, ...]:
    """Replace every number that follows from shapes by what it is: a constant, or a function of the batch size.

    The batch size becomes a placeholder, so that a stage need not be sent such numbers. Returns the new `outputs`.
    """
    graph = module.graph
    writer = _Numbers(graph, batches, one)
    of_shapes: set[torch.fx.Node] = set()
    for node in list(graph.nodes):
        if node.op not in ("call_function", "call_method") or node.name not in two or one[node.name].draws:
            continue
        if not (_asks_shape(node) or (node.all_input_nodes and of_shapes.issuperset(node.all_input_nodes))):
            continue
        of_shapes.add(node)
        literal = writer.literal(one[node.name], two[node.name])
        if literal is not None:
            for user in list(node.users):
                user.args = map_leaves(user.args, lambda leaf: literal if leaf is node else leaf)  # noqa: B023
                user.kwargs = map_leaves(user.kwargs, lambda leaf: literal if leaf is node else leaf)  # noqa: B023
            outputs = [literal if leaf is node else leaf for leaf in outputs]
    kept = {leaf for leaf in outputs if isinstance(leaf, torch.fx.Node)}
    for node in reversed(list(graph.nodes)):
        if node in of_shapes and not node.users and node not in kept:
            graph.erase_node(node)
    return tuple(outputs)


def _asks_shape(node: torch.fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in ("size", "dim", "numel", "nelement", "ndimension", "__len__")
    if node.target is getattr:
        return node.args[1] in ("shape", "ndim")
    return node.target in (torch.ops.aten.sym_size.int, torch.ops.aten.sym_numel.default, len)


class _Numbers:
    """Makes what stands for numbers in a graph."""

    def __init__(self, graph: torch.fx.Graph, batches: BatchDims, seen: dict[str, Seen]) -> None:
        self._graph = graph
        self._batches = batches
        self._seen = seen
        self._lines: dict[tuple[float, float], torch.fx.Node] = {}

    def literal(self, one: Seen, two: Seen) -> Any:
        """The number or tuple of numbers that a node gives, as an argument of others; None if it is something else."""
        if one.tree.paths("") != two.tree.paths("") or (one.tree.build is not None and not self._flat(one)):
            return None
        items = [self._number(few, many) for few, many in zip(one.leaves, two.leaves, strict=True)]
        if None in items:
            return None
        return items[0] if one.tree.build is None else tuple(items)

    @staticmethod
    def _flat(seen: Seen) -> bool:
        return seen.tree.build in (tuple, torch.Size) and all(child.build is None for child in seen.tree.children)

    def _number(self, few: Any, many: Any) -> Any:
        if not isinstance(few, int | float) or not isinstance(many, int | float):
            return None
        if few == many:
            return few
        line = self._batches.line(few, many)
        return None if line is None else self._node(line)

    def _node(self, line: tuple[float, float]) -> torch.fx.Node:
        if line not in self._lines:
            first = next(iter(self._graph.nodes))
            if not self._lines:
                with self._graph.inserting_before(first):
                    batch = self._graph.placeholder("batch_size")
                batch.meta["input"] = BATCH
                self._seen[batch.name] = Seen(LEAF, (self._batches.sample,))
                self._lines[1, 0] = batch
            if line not in self._lines:
                batch = self._lines[1, 0]
                with self._graph.inserting_after(batch):
                    node = self._graph.call_function(straight, (batch, *line))
                self._seen[node.name] = Seen(LEAF, (line[0] * self._batches.sample + line[1],))
                self._lines[line] = node
        return self._lines[line]
