"""What a traced model is: layers, the values that pass between them, and the graph that holds both."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.fx
from torch import Tensor, nn

from funcpipe.model.graph.program import attribute
from funcpipe.model.graph.signature import Signature
from funcpipe.model.graph.tree import Tree


@dataclass(frozen=True)
class Value:
    """A tensor made by the layer `producer` and read by the later layers `consumers`; shape and type are the
    sample's.

    `differentiable` says that a gradient travels back. `stride` is the layout in memory; `batched` says that the
    first dimension is the batch. A `scalar` is a Python number of the user's code, which travels as a tensor without
    dimensions.
    """

    name: str
    producer: int
    consumers: tuple[int, ...]
    differentiable: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...] = ()
    batched: bool = False
    scalar: bool = False

    @property
    def bytes(self) -> int:
        """The size of its elements, without what a view leaves out."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Crossing:
    """A node whose value later layers read: its tree, and for each leaf a Value's name or a constant."""

    node: str
    producer: int
    consumers: tuple[int, ...]
    tree: Tree
    names: tuple[str | None, ...]
    constants: tuple[object, ...]


@dataclass(frozen=True)
class Layer:
    """A piece of the model that is never cut: the module at the path `name`, with the operations that follow it.

    A module that is called again is called `name#2`, and so on. `inputs` are the model inputs that are read here;
    `draws` are the generators of random numbers that it uses. `changes` are the nodes (its own, earlier ones, or
    model inputs) whose tensors it writes into.
    """

    name: str
    nodes: tuple[torch.fx.Node, ...]
    inputs: tuple[str, ...]
    draws: frozenset[str] = frozenset()
    changes: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Statistic:
    """Running statistics as BatchNorm keeps them: `names` of the averaged buffers, `count` of the counter.

    Each call moves the averages by `momentum`; None takes the plain average of all calls.
    """

    names: tuple[str, ...]
    count: str
    momentum: float | None


@dataclass(frozen=True)
class Tie:
    """One trainable parameter that several layers use: its names in the model, and the layers."""

    names: tuple[str, ...]
    layers: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Attempt:
    """A route that was tried to make a graph of the model, and why it failed (None: it is the one that was taken)."""

    route: str
    failure: str | None = None


@dataclass(frozen=True)
class LayerGraph:
    """A model as layers in topological order.

    `module` holds the user's modules and parameters under their own paths, by reference. `inputs` are the names of
    the model's tensor inputs. `outputs` are the nodes of the model's output, put together by `output_tree`. `state`
    are the names in the model's `state_dict`; `training` tells of every module whether it was in training mode.
    """

    name: str
    module: torch.fx.GraphModule
    layers: tuple[Layer, ...]
    values: tuple[Value, ...]
    inputs: tuple[str, ...]
    batched: tuple[str, ...]
    signature: Signature
    crossings: tuple[Crossing, ...]
    outputs: tuple[torch.fx.Node | object, ...]
    output_tree: Tree
    state: frozenset[str]
    training: Mapping[str, bool]
    statistics: tuple[Statistic, ...] = ()
    attempts: tuple[Attempt, ...] = field(default=(Attempt("fx"),))
    notes: tuple[str, ...] = ()

    @property
    def route(self) -> str:
        """The route that was taken."""
        return self.attempts[-1].route

    @cached_property
    def index(self) -> Mapping[str, int]:
        """The position of each layer by name."""
        return {layer.name: i for i, layer in enumerate(self.layers)}

    @cached_property
    def ties(self) -> tuple[Tie, ...]:
        """The trainable parameters whose gradient comes from more than one layer."""
        found: dict[int, tuple[dict[str, None], dict[int, None]]] = {}
        sizes: dict[int, int] = {}
        for i, layer in enumerate(self.layers):
            for name, tensor in self.tensors_of(layer).items():
                if tensor.requires_grad:
                    names, layers = found.setdefault(id(tensor), ({}, {}))
                    names[name] = None
                    layers[i] = None
                    sizes[id(tensor)] = tensor.nbytes
        return tuple(
            Tie(tuple(names), tuple(layers), sizes[key]) for key, (names, layers) in found.items() if len(layers) > 1
        )

    def crossing(self, cut: int) -> tuple[Value, ...]:
        """The values made before layer `cut` and read by it or later."""
        return tuple(value for value in self.values if value.producer < cut <= value.consumers[-1])

    def tensors_of(self, layer: Layer) -> dict[str, Tensor]:
        """The parameters and buffers that `layer` uses, by their names in the model; tied ones under each name."""
        found: dict[str, Tensor] = {}
        for node in layer.nodes:
            if node.op == "call_module":
                module: nn.Module = attribute(self.module, str(node.target))
                for name, tensor in [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]:
                    found[f"{node.target}.{name}"] = tensor
            elif node.op == "get_attr" and isinstance(tensor := attribute(self.module, str(node.target)), Tensor):
                found[str(node.target)] = tensor
        return found
