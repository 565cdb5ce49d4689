"""Make in-place operations explicit: what reads a tensor after a write depends on the node that wrote."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch.fx
from torch import Tensor

from funcpipe.model.graph.observe import NodeRecord, TensorFacts

Nodes = tuple[torch.fx.Node, torch.fx.Node]


def identity(tensor: Tensor) -> Tensor:
    """`tensor` itself; as a node, its value after a preceding write."""
    return tensor


def functionalize(
    module: torch.fx.GraphModule, outputs: Sequence[Any], records: dict[str, NodeRecord]
) -> tuple[tuple[Any, ...], list[Nodes]]:
    """Give every node that reads a tensor after a write an edge from the node that wrote.

    The writing node replaces the tensor if it returns it (`x.add_(1)`); otherwise (`x[0] = 1`) an identity behind it
    does. Returns the new `outputs`, and pairs of nodes that no cut may separate, because memory is written under one
    name and read under another between them. Buffers of modules are left alone.
    """
    current = {node.name: node for node in module.graph.nodes}
    position = {node: i for i, node in enumerate(module.graph.nodes)}
    inseparable: list[Nodes] = []
    for node in list(module.graph.nodes):
        changed = records.get(node.name)
        if changed is None or not changed.changes:
            continue
        written = dict.fromkeys(current[name] for name in changed.changes)
        records[node.name] = replace(changed, changes=tuple(item.name for item in written))
        tensors = [item for item in written if item.op != "get_attr"]
        given = {current[name] for name in changed.direct}
        returned = {current[name] for name in changed.returns}
        differentiable = {(current[name], i) for name, i in changed.differentiable}
        later = {old: [user for user in old.users if position[user] > position[node]] for old in tensors}
        read = [old for old in tensors if later[old] or old in outputs]
        involved = sorted({*read, *given.intersection(tensors)}, key=position.__getitem__)
        inseparable += [(old, node) for old in involved[1:]]
        for old in read:
            new = node if old in returned else _behind(node, old, module.graph, position)
            if new is not node:
                records[new.name] = _after_write(records[old.name], {i for item, i in differentiable if item is old})
            for user in later[old]:
                user.replace_input_with(old, new)
            outputs = [new if item is old else item for item in outputs]
            current = {name: new if item is old else item for name, item in current.items()}
    return tuple(outputs), inseparable


def _behind(
    node: torch.fx.Node,
    old: torch.fx.Node,
    graph: torch.fx.Graph,
    position: dict[torch.fx.Node, int],
) -> torch.fx.Node:
    """A new node behind `node` that replaces `old`."""
    with graph.inserting_after(node):
        new = graph.call_function(identity, (old,))
    new.meta = {key: item for key, item in node.meta.items() if key == "call"}
    position[new] = position[node]
    return new


def _after_write(record: NodeRecord, differentiable: Collection[int]) -> NodeRecord:
    """The record of a value after a write, which has made the leaves at these positions require a gradient."""
    leaves = [
        replace(leaf, requires_grad=leaf.requires_grad or i in differentiable)
        if isinstance(leaf, TensorFacts)
        else leaf
        for i, leaf in enumerate(record.leaves)
    ]
    return NodeRecord(record.tree, tuple(leaves))
