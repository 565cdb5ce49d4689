"""A traced model: its layers, the values that pass between them, and the graph of both."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.fx
from torch import Tensor, nn

from funcpipe.core import Precision
from funcpipe.core.cached import cached_property
from funcpipe.model.graph.inputs import Signature
from funcpipe.model.graph.program import attribute, state_name
from funcpipe.model.tensors import Tree

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True)
class Value:
    """A tensor computed by the layer `producer` and read by the later layers `consumers`; shape and type are the
    sample's.

    `differentiable` says that a gradient is sent back; `symbols` names, by dimension, the free size that it is (the
    batch size, or a length of the inputs) or None. A `scalar` is a Python number of the user's code, sent as a tensor
    without dimensions.
    """

    name: str
    producer: int
    consumers: tuple[int, ...]
    differentiable: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...] = ()
    symbols: tuple[str | None, ...] = ()
    scalar: bool = False

    @property
    def bytes(self) -> int:
        """The bytes of its elements, not those of the storage that it may be a view of."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Crossing:
    """A node whose value later layers read: its tree, and for each leaf the name of a Value or a constant."""

    node: str
    producer: int
    consumers: tuple[int, ...]
    tree: Tree
    names: tuple[str | None, ...]
    constants: tuple[object, ...]


@dataclass(frozen=True)
class Layer:
    """The smallest piece of a model: a call of the module at the path `name`, with the operations that follow it.

    The second call of a module is named `name#2`, and so on. `inputs` are the model inputs that it reads.
    `changes` are the nodes (its own, earlier ones, or model inputs) whose tensors it writes to.
    """

    name: str
    nodes: tuple[torch.fx.Node, ...]
    inputs: tuple[str, ...]
    changes: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Statistic:
    """Running statistics of a norm: the `names` of the averages, and that of its counter, `count`, if it counts.

    Each of the `calls` in a forward updates the averages with `momentum`; None means the plain average over all calls.
    With `again`, the backward makes the same calls once more, as gradient checkpointing does. No `calls` were seen of a
    norm that only a block's own code may call.
    """

    names: tuple[str, ...]
    count: str | None
    momentum: float | None
    calls: int = 1
    again: bool = False

    @property
    def path(self) -> str:
        """The norm's path in the model."""
        return self.names[0].rpartition(".")[0]

    @property
    def buffers(self) -> tuple[str, ...]:
        """All its buffers by name."""
        return self.names if self.count is None else (*self.names, self.count)


@dataclass(frozen=True)
class Carried:
    """State that a forward leaves for the next one, besides running statistics: micro-batches must follow each other.

    `attributes` are Python attributes of the modules in `blocks`, whose code runs as it is; `buffers` are buffers. If
    the model itself has to be the block, whose path is empty, `used_by_model` says what its own code uses, and where.
    `statistics` says why running statistics are among the buffers, if they are.
    """

    blocks: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    used_by_model: str = ""
    statistics: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """All of it, by name."""
        return (*self.attributes, *self.buffers)

    @property
    def listed(self) -> str:
        """The first few of it, for a message, and why running statistics are among it."""
        said = first_few(self.names)
        return f"{said} ({self.statistics})" if self.statistics else said

    @property
    def way_out(self) -> str:
        """The options that train such a model."""
        other = ", or with norms that keep no running statistics, such as GroupNorm or LayerNorm"
        return f"replicas=(1,){other if self.statistics else ''}"

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on it for users."""
        if not self.names:
            return ()
        note = f"trains with one replica, as each forward leaves {self.listed} for the next one"
        if "" in self.blocks:
            return (
                f"{note}; runs whole, as one layer, as its own code uses {self.used_by_model}. To divide it, move that "
                "code into a submodule, which then runs as one block, or keep the value as a buffer that the forward "
                "changes in place",
            )
        return (f"{note}; kept as one block each: {', '.join(self.blocks)}" if self.blocks else note,)


NOTHING_CARRIED = Carried()


def first_few(names: Sequence[str]) -> str:
    """The first four of `names`, and the number of the others, for a message."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


@dataclass(frozen=True)
class Tie:
    """One trainable parameter that several layers use: its names in the model, and the layers."""

    names: tuple[str, ...]
    layers: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class Attempt:
    """A tracer that was tried on the model, and why it failed (None: it succeeded)."""

    tracer: str
    failure: str | None = None


@dataclass(frozen=True)
class LayerGraph:
    """A model as layers in topological order.

    `module` holds the user's modules and parameters under their own paths, by reference. `inputs` are the names of the
    model's tensor inputs, `batched` of those whose first dimension is the batch. `outputs` are the leaves of the
    model's output, whose structure is `output_tree`. `state` are the names of its parameters and persistent
    buffers, `tied_names` those of each parameter or buffer that has several; `training` says of every module whether it
    was in training mode. `compared` are the batch sizes for which it was compared with the model. `blocks` are the
    modules that were made one layer each, by the user or because they cannot be divided; traced with these blocks, the
    model has the same layers again. `precision` is what it was traced in, and what the layers compute in. `held` has,
    by layer, parameters that it holds though its code may not use them. `output_sizes` names the free sizes that
    dimensions of its outputs are. Unless with `shortcuts`, it was traced as code that takes none that depend on data.
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
    tied_names: tuple[tuple[str, ...], ...] = ()
    carried: Carried = NOTHING_CARRIED
    attempts: tuple[Attempt, ...] = field(default=(Attempt("fx"),))
    notes: tuple[str, ...] = ()
    compared: frozenset[int] = frozenset()
    blocks: tuple[str, ...] = ()
    precision: Precision = Precision.FP32
    held: Mapping[str, Mapping[str, nn.Parameter]] = field(default_factory=dict)
    output_sizes: frozenset[str] = frozenset()
    shortcuts: bool = True

    @property
    def tracer(self) -> str:
        """The tracer that made the graph: "fx", "export" or "eager"."""
        return self.attempts[-1].tracer

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

    @cached_property
    def value_named(self) -> Mapping[str, Value]:
        """The values by name."""
        return {value.name: value for value in self.values}

    @cached_property
    def last_read(self) -> Mapping[int, tuple[str, ...]]:
        """The names of the values that no layer after one reads, by the number of that layer."""
        found: dict[int, list[str]] = defaultdict(list)
        for value in self.values:
            found[value.consumers[-1]].append(value.name)
        return {layer: tuple(names) for layer, names in found.items()}

    @cached_property
    def sent_by(self) -> Mapping[int, tuple[Crossing, ...]]:
        """The crossings that a layer produces, by its number."""
        found: dict[int, list[Crossing]] = defaultdict(list)
        for item in self.crossings:
            found[item.producer].append(item)
        return {layer: tuple(items) for layer, items in found.items()}

    @cached_property
    def crossing_order(self) -> Mapping[str, int]:
        """The position among `crossings` of each by its node."""
        return {item.node: i for i, item in enumerate(self.crossings)}

    @cached_property
    def input_nodes(self) -> Mapping[str, str]:
        """The nodes of model inputs, by input."""
        return {node.meta["input"]: node.name for node in self.module.graph.nodes if "input" in node.meta}

    @cached_property
    def size_nodes(self) -> tuple[torch.fx.Node, ...]:
        """The nodes of free sizes."""
        return tuple(node for node in self.module.graph.nodes if "symbol" in node.meta)

    def crossing(self, cut: int) -> tuple[Value, ...]:
        """The values computed before layer `cut` and read by it or later."""
        return tuple(value for value in self.values if value.producer < cut <= value.consumers[-1])

    def to_networkx(self) -> "nx.MultiDiGraph[str]":
        """The layers as nodes and the values as edges, for networkx's algorithms and drawings.

        Nodes are layer names in topological order, with `index`, `inputs` and `parameter_bytes` (a tied parameter
        counts in each of its layers). Edges run from the producer of a value to each of its consumers; their key is the
        value's name, their attributes are `bytes`, for the sample, and `differentiable`.
        """
        import networkx as nx  # stages use this module in functions, which have no use for networkx

        graph: nx.MultiDiGraph[str] = nx.MultiDiGraph(name=self.name)
        for i, layer in enumerate(self.layers):
            tensors = {id(tensor): tensor for tensor in self.tensors_of(layer).values()}.values()
            size = sum(tensor.nbytes for tensor in tensors if isinstance(tensor, nn.Parameter))
            graph.add_node(layer.name, index=i, inputs=layer.inputs, parameter_bytes=size)
        for value in self.values:
            producer = self.layers[value.producer].name
            for consumer in value.consumers:
                name, size = self.layers[consumer].name, value.bytes
                graph.add_edge(producer, name, value.name, bytes=size, differentiable=value.differentiable)
        return graph

    def tensors_of(self, layer: Layer) -> dict[str, Tensor]:
        """The parameters and buffers that `layer` uses or holds, by their names in the model; tied ones under each."""
        found: dict[str, Tensor] = {}
        for node in layer.nodes:
            if node.op == "call_module":
                module: nn.Module = attribute(self.module, str(node.target))
                for name, tensor in [
                    *module.named_parameters(remove_duplicate=False),
                    *module.named_buffers(remove_duplicate=False),
                ]:
                    found[state_name(str(node.target), name)] = tensor
            elif node.op == "get_attr" and isinstance(tensor := attribute(self.module, str(node.target)), Tensor):
                found[str(node.target)] = tensor
        return {**found, **self.held.get(layer.name, {})}


def with_followed(graph: LayerGraph, model: nn.Module, followed: Mapping[str, str]) -> LayerGraph:
    """`graph`, which was made of `model`, with each parameter that `followed` names in a layer that holds the one too
    that it follows.

    One that no layer uses is held where the other is; if no layer uses either, by the first layer.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    users: dict[int, list[str]] = defaultdict(list)
    for layer in graph.layers:
        for key in {id(tensor) for tensor in graph.tensors_of(layer).values()}:
            users[key].append(layer.name)
    held: dict[str, dict[str, nn.Parameter]] = defaultdict(dict)
    for name, other in followed.items():
        for holder in users[id(named[name])] or users[id(named[other])] or [graph.layers[0].name]:
            held[holder] |= {name: named[name], other: named[other]}
    return replace(graph, held=dict(held)) if followed else graph
