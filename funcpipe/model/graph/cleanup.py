"""A traced graph is put in order: dead nodes dropped, what is read from the model named as the reading module names
it.
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
        if not node.users and node not in kept and _is_idle(node):
            graph.erase_node(node)
    _name_by_reader(traced.module, model)
    graph.lint()


def _is_idle(node: torch.fx.Node) -> bool:
    """Whether `node` does nothing but make its value: an operator that neither writes nor draws, or an access."""
    if node.op == "get_attr":
        return True
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    draws = torch.Tag.nondeterministic_seeded in node.target.tags
    asserts = "assert" in str(node.target) or "sym_constrain" in str(node.target)
    return asserts or not (draws or node.target._schema.is_mutable)


def _name_by_reader(module: torch.fx.GraphModule, model: nn.Module) -> None:
    """Let each node read a tensor that has several names (a tied weight) by the name that is nearest to its module."""
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    reads = {str(node.target): node for node in module.graph.nodes if node.op == "get_attr"}
    for target, node in list(reads.items()):
        choices = names[id(tensors[target])] if target in tensors else []
        for user in list(node.users) if len(choices) > 1 else ():
            path = f"{(user.meta.get('call') or ('', None))[0]}."
            best = max(choices, key=lambda name: (_common(name, path), name == target))
            if best not in reads:
                _assign_attr(tensors[best], module, best)
                with module.graph.inserting_before(node):
                    reads[best] = module.graph.get_attr(best)
            user.replace_input_with(node, reads[best])


def _common(one: str, other: str) -> int:
    """How many characters at the beginning are the same."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
