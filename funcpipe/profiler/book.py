"""What the runs of the layers add up to: the profiles of layers and tensors."""

import statistics
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from funcpipe.core import LayerProfile, PlatformSpec, TensorProfile
from funcpipe.graph import LayerGraph
from funcpipe.profiler.measure import Run


class Book:
    """Takes the layers' runs in order.

    A storage that several layers save for their backwards counts with the first of them.
    """

    def __init__(self, graph: LayerGraph, spec: PlatformSpec, inputs: Mapping[str, Tensor]) -> None:
        self._graph = graph
        self._spec = spec
        self._inputs = inputs
        self._alive: dict[int, set[str]] = {}  # the names of the values and inputs that lie in each storage
        self._counted: set[int] = set()
        self._bytes: dict[str, int] = {}
        for name, tensor in inputs.items():
            self._alive.setdefault(_address(tensor), set()).add(name)
        self.layers: list[LayerProfile] = []

    def enter(self, first: Run, timed: Sequence[Run]) -> None:
        """Add the next layer: its first run, of which the tensors are used further, and those that were timed."""
        number = len(self.layers)
        layer = self._graph.layers[number]
        tensors = {id(tensor): tensor for tensor in self._graph.tensors_of(layer).values()}.values()
        trainable = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter) and tensor.requires_grad]
        parameter_bytes = sum(tensor.nbytes for tensor in trainable)
        new = {address: size for address, size in first.saved.items() if address not in self._counted}
        self.layers.append(
            LayerProfile(
                name=layer.name,
                parameter_bytes=parameter_bytes,
                constant_bytes=sum(tensor.nbytes for tensor in tensors) - parameter_bytes,
                activation_bytes=sum(new.values()),
                input_bytes=sum(self._inputs[name].nbytes for name in layer.inputs),
                forward_s=self._scaled([run.forward_s for run in timed]),
                backward_s=self._scaled([run.backward_s for run in timed]),
            )
        )
        for name, tensor in first.sent.items():
            self._bytes[name] = tensor.numel() * tensor.itemsize
            self._alive.setdefault(_address(tensor), set()).add(name)
        self._counted |= new.keys() & self._alive.keys()
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
            )
            for value in self._graph.values
        )

    def _scaled(self, seconds: Sequence[float]) -> tuple[float, ...]:
        return tuple(statistics.median(seconds) / size.vcpu for size in self._spec.sizes)

    def _forget(self, number: int) -> None:
        """Drop the values that nobody reads after layer `number`: their addresses will be used again."""
        gone = {value.name for value in self._graph.values if value.consumers[-1] == number}
        for address, names in list(self._alive.items()):
            names -= gone
            if not names:
                del self._alive[address]
                self._counted.discard(address)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
