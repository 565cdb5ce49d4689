"""What all tracers take and return."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.fx
from torch import Tensor, nn
from torch.nn.utils import parametrize

from funcpipe.model.graph.signature import Signature
from funcpipe.model.graph.tree import Tree, flatten


@dataclass(frozen=True)
class TraceRequest:
    """A model to trace: its signature, inputs for two batch sizes, and `blocks`, modules not to be traced into."""

    model: nn.Module
    signature: Signature
    examples: tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
    blocks: frozenset[str] = frozenset()

    def is_leaf(self, module: nn.Module, path: str) -> bool:
        """Whether `module` becomes one node: a block, or a module of torch.nn that is not parametrized."""
        if path in self.blocks:
            return True
        from_torch = type(module).__module__.startswith("torch.nn") and not isinstance(module, _CONTAINERS)
        return from_torch and not parametrize.is_parametrized(module)


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class Traced:
    """A traced model: its graph, the leaves and the tree of its output, and `notes` on how it differs from the model.

    `call` in a node's meta is the call of the innermost module that made it: the module's path and any hashable key.
    """

    module: torch.fx.GraphModule
    outputs: tuple[Any, ...]
    output_tree: Tree
    notes: tuple[str, ...] = field(default=())


def innermost(stack: Mapping[str, tuple[str, Any]], request: TraceRequest, modules: Mapping[str, nn.Module]) -> Any:
    """The outermost module on a call stack that is a leaf or has no children, as (path, call), if any."""
    for key, (path, _) in stack.items():
        module = modules.get(path)
        if path and module is not None and (request.is_leaf(module, path) or not any(module.children())):
            return path, key
    return None


def flatten_output(output: Any) -> tuple[list[Any], Tree, tuple[str, ...]]:
    """The leaves and the tree of a model's output; caches and other opaque objects become None, with notes."""
    leaves, tree = flatten(output, opaque=_is_cache)
    notes = []
    for i, (leaf, path) in enumerate(zip(leaves, tree.paths("output"), strict=True)):
        if not isinstance(leaf, _PLAIN):
            leaves[i] = None
            notes.append(f"{path} ({type(leaf).__name__}) is dropped from the model's output")
    return leaves, tree, tuple(notes)


_PLAIN = (Tensor, torch.fx.Proxy, int, float, complex, bool, str, bytes, torch.dtype, torch.device, type(None))


def _is_cache(value: Any) -> bool:
    return type(value).__name__.endswith("Cache")
