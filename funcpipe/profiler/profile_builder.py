"""Collect runs of layers into the profiles of layers and tensors."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from funcpipe.core import LayerProfile, TensorProfile
from funcpipe.model.graph import LayerGraph
from funcpipe.profiler.measure import LayerRun, Times, Timing


class ProfileBuilder:
    """Collects the runs of layers, in order; `output_bytes` are those of the last one's output.

    A storage that several layers save for backward counts for the first of them.
    """

    def __init__(self, graph: LayerGraph, sizes: int, inputs: Mapping[str, Tensor]) -> None:
        self._graph = graph
        self._sizes = sizes
        self._inputs = inputs
        self._alive: dict[int, _Storage] = {}  # by address: storages of values that are still to be read
        self._saved_by: dict[str, tuple[int, ...]] = {}
        self._bytes: dict[str, int] = {}
        for name, tensor in inputs.items():
            self._alive.setdefault(_address(tensor), _Storage()).names.add(name)
        self._added: list[tuple[LayerProfile, Timing]] = []
        self.output_bytes = 0

    def add_layer(self, run: LayerRun, timing: Timing) -> None:
        """Add the next layer: its run on the values that later layers read, and its times, to be asked for later."""
        number = len(self._added)
        layer = self._graph.layers[number]
        tensors = {id(tensor): tensor for tensor in self._graph.tensors_of(layer).values()}.values()
        trainable = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter) and tensor.requires_grad]
        parameter_bytes = sum(tensor.nbytes for tensor in trainable)
        for name, tensor in run.sent.items():
            self._bytes[name] = tensor.numel() * tensor.itemsize
            self._alive.setdefault(_address(tensor), _Storage()).names.add(name)
        untimed = LayerProfile(
            name=layer.name,
            parameter_bytes=parameter_bytes,
            constant_bytes=sum(tensor.nbytes for tensor in tensors) - parameter_bytes,
            activation_bytes=self._newly_saved(number, run),
            input_bytes=sum(self._inputs[name].nbytes for name in layer.inputs),
            forward_s=(0.0,) * self._sizes,
            backward_s=(0.0,) * self._sizes,
        )
        self._added.append((untimed, timing))
        self.output_bytes = run.output_bytes
        self._forget(number)

    def layers(self) -> list[LayerProfile]:
        """Return all layers with their times, once all are added."""
        return [_timed(layer, timing()) for layer, timing in self._added]

    def tensors(self) -> tuple[TensorProfile, ...]:
        """Return the values that pass between layers, once all layers are added."""
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

    def _newly_saved(self, number: int, run: LayerRun) -> int:
        """Return the bytes of the storages that this layer is the first to save."""
        new = 0
        for address, size in run.saved.items():
            storage = self._alive.get(address)
            if storage is None or not storage.saved_by:
                new += size
            if storage is not None:
                storage.saved_by.append(number)
        return new

    def _forget(self, number: int) -> None:
        """Drop the values that no layer after `number` reads: their addresses will be reused."""
        gone = {value.name for value in self._graph.values if value.consumers[-1] == number}
        for address, storage in list(self._alive.items()):
            for name in storage.names & gone:
                self._saved_by[name] = tuple(storage.saved_by)
            storage.names -= gone
            if not storage.names:
                del self._alive[address]


@dataclass
class _Storage:
    """The storage of some values: their names, and the layers that save it."""

    names: set[str] = field(default_factory=set)
    saved_by: list[int] = field(default_factory=list)


def _timed(layer: LayerProfile, times: Sequence[Times]) -> LayerProfile:
    largest = times[-1]
    return replace(
        layer,
        forward_s=tuple(statistics.median(size.forward_s) for size in times),
        backward_s=tuple(statistics.median(size.backward_s) for size in times),
        workspace_bytes=max(size.workspace_bytes for size in times),
        forward_spread=_spread(largest.forward_s),
        backward_spread=_spread(largest.backward_s),
    )


def _spread(seconds: Sequence[float]) -> float:
    if len(seconds) < 2 or statistics.median(seconds) == 0:
        return 0.0
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return (high - low) / middle


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
