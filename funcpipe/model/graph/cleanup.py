"""Clean up a traced graph: drop dead nodes, and read tied parameters under the name nearest to the module that uses
them.
"""

import torch
import torch.fx
from torch import Tensor, nn
from torch.fx.graph_module import _assign_attr

from funcpipe.model.graph.tracers import Traced


def cleanup(traced: Traced, model: nn.Module) -> None:
    """Change the graph of `traced` in place; what it computes stays the same."""
    graph = traced.module.graph
    kept = {node for node in traced.outputs if isinstance(node, torch.fx.Node)}
    for node in reversed(list(graph.nodes)):
        if not node.users and node not in kept and _has_no_effect(node):
            graph.erase_node(node)
    _name_by_reader(traced.module, model)
    graph.lint()


def _has_no_effect(node: torch.fx.Node) -> bool:
    """Whether `node` only computes its value: an attribute access, or an operator that neither mutates nor draws random
    numbers.
    """
    if node.op == "get_attr":
        return True
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    draws = torch.Tag.nondeterministic_seeded in node.target.tags
    asserts = "assert" in str(node.target) or "sym_constrain" in str(node.target)
    return asserts or not (draws or node.target._schema.is_mutable)


def _name_by_reader(module: torch.fx.GraphModule, model: nn.Module) -> None:
    """Let each node read a tensor with several names (a tied weight) under the name closest to the node's module."""
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    readers = {str(node.target): node for node in module.graph.nodes if node.op == "get_attr"}
    for target, node in list(readers.items()):
        names_of_tensor = names[id(tensors[target])] if target in tensors else []
        for user in list(node.users) if len(names_of_tensor) > 1 else ():
            path = f"{(user.meta.get('call') or ('', None))[0]}."
            best = max(names_of_tensor, key=lambda name: (_common_prefix(name, path), name == target))
            if best not in readers:
                _assign_attr(tensors[best], module, best)
                with module.graph.inserting_before(node):
                    readers[best] = module.graph.get_attr(best)
            user.replace_input_with(node, readers[best])


def _common_prefix(one: str, other: str) -> int:
    """The length of the common prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
