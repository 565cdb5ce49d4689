"""Values that any stage can make for itself: they follow from the batch size and from constants alone."""

from collections.abc import Mapping, Sequence

import torch
import torch.fx
from torch import Tensor

from funcpipe.model.graph.batch_dims import BATCH
from funcpipe.model.graph.observe import Seen
from funcpipe.model.graph.program import attribute


def mark_replicated(module: torch.fx.GraphModule, seen: Mapping[str, Seen]) -> None:
    """Set `free` in the meta of the nodes that every layer may compute for itself instead of receiving it.

    That is what is read from the model, and what operators make of buffers, constants and the batch size without
    drawing random numbers or writing into anything.
    """
    written = {name for item in seen.values() for name in item.changes}
    constant: set[torch.fx.Node] = set()  # of these other free values may be made
    for node in module.graph.nodes:
        if node.op == "get_attr":
            node.meta["free"] = True
            item = attribute(module, str(node.target))
            fixed = isinstance(item, Tensor) and not isinstance(item, torch.nn.Parameter)
            if fixed and node.name not in written:
                constant.add(node)
        elif node.op == "placeholder" and node.meta["input"] == BATCH:
            constant.add(node)
        elif constant.issuperset(node.all_input_nodes) and _can_be_made_anywhere(node, seen, written):
            node.meta["free"] = True
            constant.add(node)


def needed(nodes: Sequence[torch.fx.Node]) -> list[torch.fx.Node]:
    """The free nodes that `nodes` read, and those that these are made of, each behind what it reads."""
    found: dict[torch.fx.Node, None] = {}

    def visit(node: torch.fx.Node) -> None:
        if node.meta.get("free") and node not in found:
            for used in node.all_input_nodes:
                visit(used)
            found[node] = None

    for node in nodes:
        visit(node)
    return list(found)


def _can_be_made_anywhere(node: torch.fx.Node, seen: Mapping[str, Seen], written: set[str]) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    item = seen[node.name]
    return not item.draws and not item.changes and node.name not in written
