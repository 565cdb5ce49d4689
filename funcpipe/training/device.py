"""Where a stage computes: on the function's processor, or on its accelerator, which has a memory of its own.

Messages, the sums of replicas and checkpoints are always in the memory of the host. What a stage computes with is in
that of the device: its tensors, what it is given, and the state of its optimiser. A step copies between the two

    forward                                     inputs of a micro-batch to the device, its loss, a number, to the host
    activation-to-device, gradient-to-device    activations and gradients of a micro-batch
    activation-to-host, gradient-to-host        activations and gradients of a micro-batch
    bucket, flatten                             what replicas sum, to the host: each element once
    norm, update                                these sums, to the device: each element once
    merge                                       of a divided optimiser, sums to the device and parameters to the host
    put-tied, get-tied, -sum                    gradients of tied parameters, to the host and to the device

between two steps the state that a checkpoint holds, to the host (`state_copy`), and numbers that decide how to go on,
such as norms, are read together, not one by one (`numbers`). On the processor nothing is copied.

A device computes in the order in which it was asked, its stream, and the processor does not wait for it. All of this
but inputs, losses and numbers crosses on two streams of its own, one each way, through memory of the host that the
device can reach (pinned). So it neither waits for what was asked for later, nor holds that up:

    compute      forward 0 | forward 1 | forward 2          `send` waits for what `computed` marks, the end of forward 0
    to the host              0         | 1

    compute      backward: gradient b | a | …               `bucket` waits until b is final, and for its copy
    to the host                         b | a
"""

import ctypes
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from funcpipe.comm.buffer_pool import LEAST_BLOCK_BYTES, block, mapped
from funcpipe.core import MB
from funcpipe.core.accelerator import CONTEXT_MB
from funcpipe.core.cached import cached_property
from funcpipe.errors import PlatformRefused
from funcpipe.model.graph.program import Call, map_leaves
from funcpipe.model.graph.reachable import reached_values
from funcpipe.model.split import StageModule
from funcpipe.model.tensors import tree_map

_T = TypeVar("_T")


class Device:
    """A device on which a stage computes, and the copies between it and the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def is_host(self) -> bool:
        """True for the processor: nothing is copied."""
        return self._device.type == "cpu"

    def to_host(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `tensors` in the memory of the host, laid out as they were."""
        return {name: tensor.cpu() for name, tensor in tensors.items()}

    def to_device(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `tensors`, which are the host's, in the memory of the device."""
        return {name: tensor.to(self._device) for name, tensor in tensors.items()}

    @cached_property
    def _module(self) -> Any:
        return torch.get_device_module(self._device.type)

    @cached_property
    def _outgoing(self) -> Any:
        return self._module.Stream()

    @cached_property
    def _incoming(self) -> Any:
        return self._module.Stream()

    def computed(self) -> Any:
        """Return a mark of what the device has been asked to compute so far; None for the processor."""
        return None if self.is_host else self._module.current_stream().record_event()

    def send(self, tensors: Mapping[str, Tensor], computed: Any) -> dict[str, Tensor]:
        """Return `tensors`, which are there once `computed` is reached, in memory of the host, laid out as they were.

        Waits for nothing that was asked for later.
        """
        if self.is_host:
            return dict(tensors)
        sent = {name: torch.empty_like(tensor, device="cpu", pin_memory=True) for name, tensor in tensors.items()}
        self.leave([(sent[name], tensor) for name, tensor in tensors.items()], [computed]).synchronize()
        return sent

    def leave(self, pairs: Iterable[tuple[Tensor, Tensor]], computed: Iterable[Any]) -> Any:
        """Begin to copy to the first tensor of each pair, in pinned memory, the second; return a mark of the end.

        What is copied is there once all marks of `computed` are reached.
        """
        with self._module.stream(self._outgoing):
            for mark in computed:
                self._outgoing.wait_event(mark)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return self._outgoing.record_event()

    def enter(self, target: Tensor, source: Tensor) -> None:
        """Begin to copy `source`, in pinned memory, to `target`, with which the device has been done.

        What is asked for from now on waits for the end.
        """
        with self._module.stream(self._incoming):
            target.copy_(source, non_blocking=True)
            entered = self._incoming.record_event()
        self.wait_for(entered)

    def wait_for(self, mark: Any) -> None:
        """Have what the device is asked to compute from now on wait for `mark`."""
        self._module.current_stream().wait_event(mark)

    def receive(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `tensors`, which are the host's, in the memory of the device, and wait for nothing else there."""
        if self.is_host:
            return dict(tensors)
        computing = self._module.current_stream()
        with self._module.stream(self._incoming):
            pinned = {name: tensor.pin_memory() for name, tensor in tensors.items()}
            received = {name: tensor.to(self._device, non_blocking=True) for name, tensor in pinned.items()}
            self._incoming.record_event().synchronize()
        for tensor in received.values():
            tensor.record_stream(computing)  # or its memory could be used again while the device still computes with it
        return received

    def given(self, value: _T) -> _T:
        """Return `value` with all tensors inside in the memory of the device."""
        return self._with_tensors(value, lambda tensor: tensor.to(self._device))

    def read(self, value: _T) -> _T:
        """Return `value` with all tensors inside in the memory of the host."""
        return self._with_tensors(value, Tensor.cpu)

    def _with_tensors(self, value: _T, change: Callable[[Tensor], Tensor]) -> _T:
        if self.is_host:
            return value
        changed: _T = tree_map(value, lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf)
        return changed

    def block(self, size: int) -> Tensor:
        """Return `size` uninitialised bytes of the host, pinned if the device is another one; shape (size,)."""
        if self.is_host:
            return block(size)
        if size < LEAST_BLOCK_BYTES:
            return torch.empty(size, dtype=torch.uint8).pin_memory()
        memory = (ctypes.c_char * size).from_buffer(mapped(size))  # torch would pin up to twice as much
        place, driver = ctypes.addressof(memory), self._module.cudart()
        self._module.check_error(driver.cudaHostRegister(place, size, 0))
        weakref.finalize(memory, driver.cudaHostUnregister, place)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Return a vector on the device."""
        return torch.empty(elements, dtype=dtype, device=self._device)

    def move(self, *stages: StageModule, loss: Callable[..., Any] | None = None) -> None:
        """Have `stages` and what `loss` reaches on the device. All tensors stay the objects that they are."""
        if self.is_host:
            return
        modules = _modules(stages, loss)
        recurrent = [part for module in modules for part in module.modules() if isinstance(part, nn.RNNBase)]
        for part in recurrent:
            part._flat_weight_refs = []  # a tensor with weak references cannot be swapped
        for tensor in {id(tensor): tensor for tensor in _held(modules, loss)}.values():
            if tensor.device != self._device:
                moved = tensor.detach().to(self._device)
                if isinstance(tensor, nn.Parameter):
                    moved = nn.Parameter(moved, tensor.requires_grad)
                torch.utils.swap_tensors(tensor, moved)  # type: ignore[no-untyped-call]
        for part in recurrent:
            part._init_flat_weights()
        for stage in stages:
            layers = (replace(layer, calls=tuple(map(self._placed, layer.calls))) for layer in stage.program.layers)
            stage.program = replace(stage.program, layers=tuple(layers))
            stage.settle()

    def _placed(self, call: Call) -> Call:
        """Return `call` with this device where tracing has found that of its tensors, which were the host's; autocast
        to what the processor's was is that of this device.
        """

        def placed(leaf: Any) -> Any:
            return self._device if isinstance(leaf, torch.device) and leaf.type == "cpu" else leaf

        kwargs = {
            key: self._device if (key, value) == ("device", "cpu") else value for key, value in call.kwargs.items()
        }
        autocast = {self._device.type if device == "cpu" else device: dtype for device, dtype in call.autocast}
        return replace(
            call,
            args=map_leaves(call.args, placed),
            kwargs=map_leaves(kwargs, placed),
            autocast=tuple(autocast.items()),
        )


HOST = Device(torch.device("cpu"))
"""The function's processor."""


def accelerator(memory_mb: int) -> Device:
    """Return the accelerator of this function, set to compute deterministically.

    Of its memory this process may take `memory_mb`, with what the driver takes for it: so others that share the device
    have theirs. Raises PlatformRefused if torch finds none.
    """
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        raise PlatformRefused(
            "the stage was planned for a function with a GPU, but torch finds none here: the function needs a GPU, its "
            f"driver, and a build of torch for it (this one is {torch.__version__})"
        )
    compute_deterministically()
    module = torch.get_device_module(device.type)
    share = max(memory_mb - CONTEXT_MB, 1) * MB / module.mem_get_info()[1]
    module.set_per_process_memory_fraction(min(share, 1.0))
    module.reset_peak_memory_stats()
    return Device(torch.device(device.type, torch.accelerator.current_device_index()))


def peak_bytes() -> int:
    """Return the most memory that this process has used of its accelerator, with what the driver is taken to need."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return 0
    tensors: int = torch.get_device_module(device.type).max_memory_allocated()
    return CONTEXT_MB * MB + tensors


def compute_deterministically() -> None:
    """Have this process compute the same bits whenever it computes the same on the same model of GPU.

    It is to be called before the process uses a GPU. An operator that has no such kernel fails. TF32, which rounds the
    inputs of products to 11 bits, is off.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    vars(torch.utils)["deterministic"].fill_uninitialized_memory = False  # it would cost time to find mistakes
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def numbers(tensors: Sequence[Tensor]) -> list[float]:
    """Return the values of tensors with one element each; those of a device are read at once."""
    if not tensors or tensors[0].device.type == "cpu":
        return [tensor.item() for tensor in tensors]
    found: list[float] = torch.stack([tensor.detach().reshape(()).double() for tensor in tensors]).tolist()
    return found


def _modules(stages: Sequence[StageModule], loss: Callable[..., Any] | None) -> list[nn.Module]:
    """Return `stages`, and the modules that `loss` reaches."""
    reached = () if loss is None else reached_values(loss)
    return [*stages, *(value for _, value in reached if isinstance(value, nn.Module))]


def _held(modules: Sequence[nn.Module], loss: Callable[..., Any] | None) -> Iterator[Tensor]:
    """Yield the tensors of `modules`, and those that `loss` reaches."""
    if loss is not None:
        yield from (value for _, value in reached_values(loss) if isinstance(value, Tensor))
    for module in modules:
        yield from module.parameters()
        yield from module.buffers()
