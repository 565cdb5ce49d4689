"""What every route from a model to a graph starts from and gives."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.fx
from torch import Tensor, nn
from torch.nn.utils import parametrize

from funcpipe.model.graph.signature import Signature
from funcpipe.model.graph.tree import Tree, take_apart


@dataclass(frozen=True)
class TraceTask:
    """A model to be traced: how it is called, its inputs for two batch sizes, the modules that are to be left whole."""

    model: nn.Module
    signature: Signature
    examples: tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
    blocks: frozenset[str] = frozenset()

    def is_leaf(self, module: nn.Module, path: str) -> bool:
        """Whether `module` is left whole: a block, or one of torch.nn's, if no other module computes its parameters."""
        if path in self.blocks:
            return True
        torchs = type(module).__module__.startswith("torch.nn") and not isinstance(module, _CONTAINERS)
        return torchs and not parametrize.is_parametrized(module)


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class Traced:
    """A model's nodes in order, and the leaves and the tree of its output; `notes` says what is different from the
    model.

    Each node's meta says under `call` which call of which innermost module made it, as a path and anything hashable.
    """

    module: torch.fx.GraphModule
    outputs: tuple[Any, ...]
    output_tree: Tree
    notes: tuple[str, ...] = field(default=())


def innermost(stack: Mapping[str, tuple[str, Any]], task: TraceTask, modules: Mapping[str, nn.Module]) -> Any:
    """Of the modules that were being called, the outermost that is whole or has no children: (path, call), or None."""
    for key, (path, _) in stack.items():
        module = modules.get(path)
        if path and module is not None and (task.is_leaf(module, path) or not any(module.children())):
            return path, key
    return None


def take_output_apart(output: Any) -> tuple[list[Any], Tree, tuple[str, ...]]:
    """The leaves and the tree of a model's output, where caches and other objects become None; and what these were."""
    leaves, tree = take_apart(output, opaque=_is_cache)
    notes = []
    for i, (leaf, path) in enumerate(zip(leaves, tree.paths("output"), strict=True)):
        if not isinstance(leaf, _PLAIN):
            leaves[i] = None
            notes.append(f"{path} ({type(leaf).__name__}) is left out of the model's output")
    return leaves, tree, tuple(notes)


_PLAIN = (Tensor, torch.fx.Proxy, int, float, complex, bool, str, bytes, torch.dtype, torch.device, type(None))


def _is_cache(value: Any) -> bool:
    return type(value).__name__.endswith("Cache")
