"""Operations that write into a tensor: whoever reads it afterwards must read what they left."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.fx
from torch import Tensor

from funcpipe.model.graph.observe import Seen

Nodes = tuple[torch.fx.Node, torch.fx.Node]


def same(tensor: Tensor) -> Tensor:
    """`tensor` itself, as the operation before left it."""
    return tensor


def functionalize(
    module: torch.fx.GraphModule, outputs: Sequence[Any], seen: dict[str, Seen]
) -> tuple[tuple[Any, ...], list[Nodes]]:
    """Give every node that reads a tensor after it was written to an edge from the writer.

    The writer stands for the tensor where it returns it (`x.add_(1)`), otherwise (`x[0] = 1`) a node behind it does.
    Returns the new `outputs`, and pairs of nodes that no cut may separate: between them one memory is written to
    under one name and read under another. What a module keeps (buffers) is left alone.
    """
    current = {node.name: node for node in module.graph.nodes}
    place = {node: i for i, node in enumerate(module.graph.nodes)}
    together: list[Nodes] = []
    for node in list(module.graph.nodes):
        changed = seen.get(node.name)
        if changed is None or not changed.changes:
            continue
        written = dict.fromkeys(current[name] for name in changed.changes)
        seen[node.name] = replace(changed, changes=tuple(item.name for item in written))
        tensors = [item for item in written if item.op != "get_attr"]
        given = {current[name] for name in changed.direct}
        returned = {current[name] for name in changed.returns}
        later = {old: [user for user in old.users if place[user] > place[node]] for old in tensors}
        read = [old for old in tensors if later[old] or old in outputs]
        involved = sorted({*read, *given.intersection(tensors)}, key=place.__getitem__)
        together += [(old, node) for old in involved[1:]]
        for old in read:
            new = node if old in returned else _behind(node, old, module.graph, place, seen)
            for user in later[old]:
                user.replace_input_with(old, new)
            outputs = [new if item is old else item for item in outputs]
            current = {name: new if item is old else item for name, item in current.items()}
    return tuple(outputs), together


def _behind(
    node: torch.fx.Node,
    old: torch.fx.Node,
    graph: torch.fx.Graph,
    place: dict[torch.fx.Node, int],
    seen: dict[str, Seen],
) -> torch.fx.Node:
    """A new node behind `node` that stands for `old`."""
    with graph.inserting_after(node):
        new = graph.call_function(same, (old,))
    new.meta = {key: item for key, item in node.meta.items() if key == "call"}
    place[new] = place[node]
    seen[new.name] = Seen(seen[old.name].tree, seen[old.name].leaves)
    return new
