"""Find the values that every stage computes for itself: from constants and free sizes alone."""

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.fx
from torch import Tensor

from funcpipe.model.graph.expectations import EXPECTATIONS
from funcpipe.model.graph.observe import NodeRecord
from funcpipe.model.graph.program import attribute

Reads = Mapping[torch.fx.Node, Sequence[torch.fx.Node]]


def mark_replicated(module: torch.fx.GraphModule, records: Mapping[str, NodeRecord], changed: Collection[int]) -> None:
    """Set `replicated` in the meta of the nodes that every layer computes for itself instead of receiving their values.

    These are the attributes of the model, and the results of operators on buffers, constants and free sizes that
    draw no random numbers and mutate nothing. `changed` are the identities of buffers that a forward changes, as by a
    module: what reads one must run at its place, and in the stage that changes it.
    """
    written = {name for item in records.values() for name in item.written}
    constant: set[torch.fx.Node] = set()  # what other replicated nodes may read
    for node in module.graph.nodes:
        if node.op == "get_attr":
            node.meta["replicated"] = True
            item = attribute(module, str(node.target))
            fixed = isinstance(item, Tensor) and not isinstance(item, torch.nn.Parameter)
            if fixed and node.name not in written and id(item) not in changed:
                constant.add(node)
        elif "symbol" in node.meta:
            constant.add(node)
        elif constant.issuperset(node.all_input_nodes) and _is_pure(node, records, written):
            node.meta["replicated"] = True
            constant.add(node)


def replicated_reads(graph: torch.fx.Graph) -> Reads:
    """The replicated nodes of `graph`, and for each those that it reads."""
    reads: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for node in graph.nodes:
        if node.meta.get("replicated"):
            reads[node] = [used for used in node.all_input_nodes if used in reads]
    return reads


def needed(reads: Reads, nodes: Sequence[torch.fx.Node]) -> list[torch.fx.Node]:
    """Those of `nodes` that are replicated and what they read, directly or through others, in topological order."""
    found: dict[torch.fx.Node, None] = {}
    for source in nodes:
        stack = [source] if source in reads else []
        while stack:
            if missing := [used for used in reads[stack[-1]] if used not in found]:
                stack.extend(reversed(missing))
            else:
                found[stack.pop()] = None
    return list(found)


def _is_pure(node: torch.fx.Node, records: Mapping[str, NodeRecord], written: set[str]) -> bool:
    if node.op not in ("call_function", "call_method") or node.target in EXPECTATIONS:
        return False
    item = records[node.name]
    return not item.draws and not item.changes and node.name not in written
