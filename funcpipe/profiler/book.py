"""What the runs of the layers add up to: the profiles of layers and tensors."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from funcpipe.core import LayerProfile, PlatformSpec, TensorProfile
from funcpipe.graph import LayerGraph
from funcpipe.profiler.measure import Run, Times


class Book:
    """Takes the layers' runs in order.

    A storage that several layers save for their backwards counts with the first of them.
    """

    def __init__(self, graph: LayerGraph, spec: PlatformSpec, inputs: Mapping[str, Tensor]) -> None:
        self._graph = graph
        self._spec = spec
        self._inputs = inputs
        self._alive: dict[int, _Storage] = {}  # by address: where the values lie that are still to be read
        self._saved_by: dict[str, tuple[int, ...]] = {}
        self._bytes: dict[str, int] = {}
        for name, tensor in inputs.items():
            self._alive.setdefault(_address(tensor), _Storage()).names.add(name)
        self.layers: list[LayerProfile] = []

    def enter(self, run: Run, times: Times) -> None:
        """Add the next layer: its run on the values that are used further, and what it takes."""
        number = len(self.layers)
        layer = self._graph.layers[number]
        tensors = {id(tensor): tensor for tensor in self._graph.tensors_of(layer).values()}.values()
        trainable = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter) and tensor.requires_grad]
        parameter_bytes = sum(tensor.nbytes for tensor in trainable)
        for name, tensor in run.sent.items():
            self._bytes[name] = tensor.numel() * tensor.itemsize
            self._alive.setdefault(_address(tensor), _Storage()).names.add(name)
        self.layers.append(
            LayerProfile(
                name=layer.name,
                parameter_bytes=parameter_bytes,
                constant_bytes=sum(tensor.nbytes for tensor in tensors) - parameter_bytes,
                activation_bytes=self._newly_saved(number, run),
                input_bytes=sum(self._inputs[name].nbytes for name in layer.inputs),
                forward_s=self._scaled(times.forward_s),
                backward_s=self._scaled(times.backward_s),
                workspace_bytes=times.workspace_bytes,
                forward_spread=_spread(times.forward_s),
                backward_spread=_spread(times.backward_s),
            )
        )
        self._forget(number)

    def tensors(self) -> tuple[TensorProfile, ...]:
        """The values that pass between layers, once all layers are entered."""
        return tuple(
            TensorProfile(
                name=value.name,
                producer=value.producer,
                consumers=value.consumers,
                forward_bytes=self._bytes[value.name],
                backward_bytes=self._bytes[value.name] if value.differentiable else 0,
                saved_by=self._saved_by[value.name],
            )
            for value in self._graph.values
        )

    def _newly_saved(self, number: int, run: Run) -> int:
        """The bytes of the storages that this layer saves and none before it did."""
        new = 0
        for address, size in run.saved.items():
            storage = self._alive.get(address)
            if storage is None or not storage.saved_by:
                new += size
            if storage is not None:
                storage.saved_by.append(number)
        return new

    def _scaled(self, seconds: Sequence[float]) -> tuple[float, ...]:
        return tuple(statistics.median(seconds) / size.vcpu for size in self._spec.sizes)

    def _forget(self, number: int) -> None:
        """Drop the values that nobody reads after layer `number`: their addresses will be used again."""
        gone = {value.name for value in self._graph.values if value.consumers[-1] == number}
        for address, storage in list(self._alive.items()):
            for name in storage.names & gone:
                self._saved_by[name] = tuple(storage.saved_by)
            storage.names -= gone
            if not storage.names:
                del self._alive[address]


@dataclass
class _Storage:
    """Memory in which values lie: their names, and the layers that save it."""

    names: set[str] = field(default_factory=set)
    saved_by: list[int] = field(default_factory=list)


def _spread(seconds: Sequence[float]) -> float:
    if len(seconds) < 2 or statistics.median(seconds) == 0:
        return 0.0
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return (high - low) / middle


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
