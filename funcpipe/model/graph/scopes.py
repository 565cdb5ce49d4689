"""Regions of an exported graph with gradients or autocast on or off, dissolved into the nodes around them.

torch.export makes one operator of all that code does under `torch.autocast` or `torch.no_grad`: the modules in it could
not be told apart, and the operators load torch's compiler when they run, 80 MB and two seconds in a function.
"""

from typing import Any

import torch
import torch.fx
from torch._higher_order_ops.wrap import wrap_with_autocast, wrap_with_set_grad_enabled

from funcpipe.model.graph.autocast import Autocast, autocast_state, changed_autocast


def dissolve_scopes(exported: torch.fx.GraphModule) -> None:
    """Put the nodes of each region in its place, and note at each node what holds there: `no_grad` and `autocast`.

    Outside of all regions gradients are on, and autocast is what it is now.
    """
    _dissolve(exported, no_grad=False, autocast=autocast_state())


def _dissolve(module: torch.fx.GraphModule, *, no_grad: bool, autocast: Autocast) -> None:
    for node in list(module.graph.nodes):
        if node.target is wrap_with_set_grad_enabled:
            enabled, region, *given = node.args
            _dissolve(_of(module, region), no_grad=not enabled, autocast=autocast)
        elif node.target is wrap_with_autocast:
            device, dtype, enabled, _, region, *given = node.args
            inside = changed_autocast(autocast, device, dtype, enabled=enabled)
            _dissolve(_of(module, region), no_grad=no_grad, autocast=inside)
        else:
            node.meta |= {"no_grad": no_grad, "autocast": autocast}
            continue
        _put_in_place(module.graph, node, region, _of(module, region).graph, given)
    module.recompile()


def _of(module: torch.fx.GraphModule, region: torch.fx.Node) -> torch.fx.GraphModule:
    found = module.get_submodule(str(region.target))
    assert isinstance(found, torch.fx.GraphModule), "torch makes a graph of each region"
    return found


def _put_in_place(
    outer: torch.fx.Graph, call: torch.fx.Node, region: torch.fx.Node, inner: torch.fx.Graph, given: list[Any]
) -> None:
    """Replace the node `call`, which runs `inner`, the graph of `region`, on `given`, by the nodes of that graph."""
    placeholders = [node for node in inner.nodes if node.op == "placeholder"]
    places: dict[torch.fx.Node, torch.fx.Node] = dict(zip(placeholders, given, strict=True))
    with outer.inserting_before(call):
        results = outer.graph_copy(inner, places)
    for node in inner.nodes:
        if node.op == "get_attr":
            places[node].target = f"{region.target}.{node.target}"
    assert isinstance(results, tuple), "torch makes each region return a tuple"
    for item in list(call.users):
        number: Any = item.args[1]
        item.replace_all_uses_with(results[number])
        outer.erase_node(item)
    outer.erase_node(call)
    if not region.users:
        outer.erase_node(region)
