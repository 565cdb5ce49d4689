"""Infer from runs with two batch sizes which dimensions and numbers of a graph depend on the batch size."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx

from funcpipe.model.graph.eager_graph import linear
from funcpipe.model.graph.observe import NodeRecord, TensorFacts
from funcpipe.model.graph.program import is_number, map_leaves
from funcpipe.model.graph.tree import LEAF

BATCH = "batch size"
"""The entry `input` in the meta of the placeholder that stands for the batch size."""


@dataclass(frozen=True)
class BatchDims:
    """The batch sizes of two runs, and that of the user's sample."""

    few: int
    many: int
    sample: int

    def line(self, few: float, many: float) -> tuple[float, float] | None:
        """The slope and offset of the line through a number that is `few` in one run and `many` in the other; None if
        integers have no integral slope, or the batch sizes are equal and the numbers are not.
        """
        if self.few == self.many:
            return (0, few) if few == many else None
        slope = (many - few) / (self.many - self.few)
        if isinstance(few, int) and isinstance(many, int):
            if slope != int(slope):
                return None
            slope = int(slope)
        return slope, few - slope * self.few

    def at_sample(self, few: int, many: int) -> int:
        """A length at the sample's batch size, from its lengths in the two runs."""
        line = self.line(few, many)
        return few if line is None else int(line[0] * self.sample + line[1])


def at_sample_size(one: NodeRecord, two: NodeRecord, batches: BatchDims) -> NodeRecord:
    """The record of a node at the sample's batch size."""
    if len(one.leaves) != len(two.leaves):
        return one
    leaves = []
    for few, many in zip(one.leaves, two.leaves, strict=True):
        if isinstance(few, TensorFacts) and isinstance(many, TensorFacts) and len(few.shape) == len(many.shape):
            shape = tuple(batches.at_sample(a, b) for a, b in zip(few.shape, many.shape, strict=True))
            batched = few.shape[:1] == (batches.few,) and many.shape[:1] == (batches.many,)
            leaves.append(replace(few, shape=shape, batched=batched and batches.few != batches.many))
        else:
            leaves.append(few)
    return replace(one, leaves=tuple(leaves))


def resolve_batch_dims(
    module: torch.fx.GraphModule,
    outputs: Sequence[Any],
    one: dict[str, NodeRecord],
    two: dict[str, NodeRecord],
    batches: BatchDims,
) -> tuple[Any, ...]:
    """Replace every number that is computed from shapes by a constant or by a function of the batch size.

    The batch size becomes a placeholder, so that no stage has to send such numbers. Returns the new `outputs`.
    """
    graph = module.graph
    numbers = _BatchNumbers(graph, batches, one)
    from_shapes: set[torch.fx.Node] = set()
    for node in list(graph.nodes):
        if node.op not in ("call_function", "call_method") or node.name not in two or one[node.name].draws:
            continue
        if not (_reads_shape(node) or (node.all_input_nodes and from_shapes.issuperset(node.all_input_nodes))):
            continue
        from_shapes.add(node)
        literal = numbers.literal(one[node.name], two[node.name])
        if literal is not None:
            for user in list(node.users):
                user.args = map_leaves(user.args, lambda leaf: literal if leaf is node else leaf)  # noqa: B023
                user.kwargs = map_leaves(user.kwargs, lambda leaf: literal if leaf is node else leaf)  # noqa: B023
            outputs = [literal if leaf is node else leaf for leaf in outputs]
    kept = {leaf for leaf in outputs if isinstance(leaf, torch.fx.Node)}
    for node in reversed(list(graph.nodes)):
        if node in from_shapes and not node.users and node not in kept:
            graph.erase_node(node)
    return tuple(outputs)


def _reads_shape(node: torch.fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in ("size", "dim", "numel", "nelement", "ndimension", "__len__")
    if node.target is getattr:
        return node.args[1] in ("shape", "ndim")
    return node.target in (torch.ops.aten.sym_size.int, torch.ops.aten.sym_numel.default, len)


class _BatchNumbers:
    """Adds nodes to a graph that compute numbers from the batch size, one for each line."""

    def __init__(self, graph: torch.fx.Graph, batches: BatchDims, records: dict[str, NodeRecord]) -> None:
        self._graph = graph
        self._batches = batches
        self._records = records
        self._lines: dict[tuple[float, float], torch.fx.Node] = {}

    def literal(self, one: NodeRecord, two: NodeRecord) -> Any:
        """A node's value as an argument of others, if it is a number or a tuple of numbers; otherwise None."""
        if one.tree.paths("") != two.tree.paths("") or (one.tree.build is not None and not self._flat(one)):
            return None
        items = [self._number(few, many) for few, many in zip(one.leaves, two.leaves, strict=True)]
        if None in items:
            return None
        return items[0] if one.tree.build is None else tuple(items)

    @staticmethod
    def _flat(record: NodeRecord) -> bool:
        return record.tree.build in (tuple, torch.Size) and all(child.build is None for child in record.tree.children)

    def _number(self, few: Any, many: Any) -> Any:
        if few == many and isinstance(few, int | float):
            return few
        if not is_number(few) or not is_number(many):
            return None
        line = self._batches.line(few, many)
        return None if line is None else self._node(line)

    def _node(self, line: tuple[float, float]) -> torch.fx.Node:
        if line not in self._lines:
            first = next(iter(self._graph.nodes))
            if not self._lines:
                with self._graph.inserting_before(first):
                    batch = self._graph.placeholder("batch_size")
                batch.meta["input"] = BATCH
                self._records[batch.name] = NodeRecord(LEAF, (self._batches.sample,))
                self._lines[1, 0] = batch
            if line not in self._lines:
                batch = self._lines[1, 0]
                with self._graph.inserting_after(batch):
                    node = self._graph.call_function(linear, (batch, *line))
                self._records[node.name] = NodeRecord(LEAF, (line[0] * self._batches.sample + line[1],))
                self._lines[line] = node
        return self._lines[line]
