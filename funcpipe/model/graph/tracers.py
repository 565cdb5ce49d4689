"""The request that all tracers take, the traced model that they return, and errors that they raise."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.fx
from torch import Tensor, nn
from torch.nn.utils import parametrize

from funcpipe.model.graph.inputs import Signature
from funcpipe.model.tensors import Tree, flatten


class Unrecordable(Exception):
    """Code that a tracer cannot make a graph of; `path` is the module to blame, None where only the frames tell it."""

    def __init__(self, reason: str, path: str | None = None, where: str = "") -> None:
        super().__init__(reason)
        self.path = path
        self.where = where


class TooSlow(Unrecordable):
    """A tracer has been given up because of the time that it takes."""


@dataclass(frozen=True)
class TraceRequest:
    """A model to trace: its signature, inputs of two sizes, which have so many `samples`, and `blocks`, modules not to
    be traced into.

    `saves_tensors` says that the model needs what autograd saves already in its forward pass; `changed` are the buffers
    that a forward changes.
    """

    model: nn.Module
    signature: Signature
    examples: tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
    samples: tuple[int, int]
    blocks: frozenset[str] = frozenset()
    saves_tensors: bool = False
    changed: frozenset[str] = frozenset()

    def is_batched(self, name: str) -> bool:
        """Return whether the first dimension of an input is the batch."""
        return all(
            example[name].shape[:1] == (samples,) for example, samples in zip(self.examples, self.samples, strict=True)
        )

    def is_leaf(self, module: nn.Module, path: str) -> bool:
        """Return whether `module` becomes one node: a block, or a module of torch.nn that is not parametrized."""
        if path in self.blocks or isinstance(module, torch.jit.ScriptModule):
            return True
        from_torch = type(module).__module__.startswith("torch.nn") and not isinstance(module, _CONTAINERS)
        return from_torch and not parametrize.is_parametrized(module)


_CONTAINERS = (
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.ParameterList,
    nn.ParameterDict,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
)


def is_innermost(module: nn.Module) -> bool:
    """Return whether a module has no children, but for lists of parameters."""
    return all(isinstance(child, nn.ParameterList | nn.ParameterDict) for child in module.children())


class RecordedModule(torch.fx.GraphModule):
    """Holds a graph and what its nodes refer to. Its nodes are run one by one, so no code is generated for them: names
    and arguments of recorded calls need not be valid in a program.
    """

    def recompile(self) -> torch.fx.graph.PythonCode:
        """Generate nothing."""
        return torch.fx.graph.PythonCode("", {}, None)


class LengthsFixed(Exception):
    """A tracer can only trace the model for inputs of one length each."""


@dataclass(frozen=True)
class Traced:
    """A traced model: its graph, the leaves and the tree of its output, and `notes` on how it differs from the model.

    `call` in a node's meta is the call of the innermost module that made it: the module's path and any hashable key.
    `fixed` names the dimensions of inputs, by input, that must have the sizes of the examples; `guards` are more
    conditions on `sizes[input][dimension]`, in Python.
    """

    module: torch.fx.GraphModule
    outputs: tuple[Any, ...]
    output_tree: Tree
    notes: tuple[str, ...] = field(default=())
    fixed: Mapping[str, Collection[int]] = field(default_factory=dict)
    guards: tuple[str, ...] = ()


def innermost(stack: Mapping[str, tuple[str, Any]], request: TraceRequest, modules: Mapping[str, nn.Module]) -> Any:
    """The outermost module on a call stack that is a leaf or innermost, as (path, call), if any."""
    for key, (path, _) in stack.items():
        module = modules.get(path)
        if path and module is not None and (request.is_leaf(module, path) or is_innermost(module)):
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


SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
"""Numbers of the exporter that depend on sizes."""

_PLAIN = (
    Tensor,
    torch.fx.Proxy,
    *SYMBOLIC,
    int,
    float,
    complex,
    bool,
    str,
    bytes,
    torch.dtype,
    torch.device,
    type(None),
)


def _is_cache(value: Any) -> bool:
    return type(value).__name__.endswith("Cache")
