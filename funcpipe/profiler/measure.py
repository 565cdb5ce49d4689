"""Measurements: the time and memory of one layer, and the memory of a function before it holds any."""

import contextlib
import functools
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from funcpipe.core import LayerReport, PlatformSpec
from funcpipe.core.accelerator import Work
from funcpipe.errors import RunError
from funcpipe.model.split import StageModule
from funcpipe.model.tensors import fingerprint, flatten, stand_in, storage_id
from funcpipe.platforms.process import environment
from funcpipe.profiler.work import WorkCounter

Loss = Callable[[Any], Tensor]

_CACHE_BYTES = 32 << 20  # more than a core keeps for itself


@dataclass(frozen=True)
class LayerRun:
    """A forward pass of a layer: the tensors it sends, and what it saves for backward.

    That is `own_bytes` in storages that no other layer sees, on a GPU `device_bytes`, and those that are `saved` among
    the storages of values that pass between layers (address to bytes). `output_bytes` are those of the model's output,
    if it makes that.
    """

    sent: Mapping[str, Tensor]
    saved: Mapping[int, int]
    own_bytes: int = 0
    device_bytes: int = 0
    output_bytes: int = 0


Timing = Callable[[], Sequence[LayerReport]]
"""Returns what was measured of a layer for each size of a platform; call it when the Measure has seen all layers."""

Measure = Callable[[StageModule, Mapping[str, Tensor], Loss | None, int], Timing]
"""Takes a layer, its values, the last layer's loss and the repeats; measures at once or when the Timing is called."""


def run_layer(stage: StageModule, values: Mapping[str, Tensor], loss: Loss | None = None) -> LayerRun:
    """Run a layer forward once on `values`, the last one with `loss`; again if a GPU keeps less of its attention."""
    with AttentionOfGpus(replace=False) as attention:
        found = _run(stage, values, loss)
    if not attention.found:
        return found
    with AttentionOfGpus(replace=True):
        return replace(found, device_bytes=_run(stage, values, loss).device_bytes)


class AttentionOfGpus(TorchFunctionMode):
    """Finds attention with dropout, which keeps probabilities on a processor but none on a GPU, and may `replace` it by
    attention without dropout, which keeps as much as on a GPU.
    """

    def __init__(self, *, replace: bool) -> None:
        super().__init__()
        self._replace = replace
        self.found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention and (kwargs.get("dropout_p") or any(args[4:5])):
            self.found = True
            if self._replace:
                args = (*args[:4], *(0.0 for _ in args[4:5]), *args[5:])
                kwargs.pop("dropout_p", None)
        return func(*args, **kwargs)


class Noise(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds what dropout multiplies by on a processor: a number for each element, for which a GPU keeps a byte."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.element_bytes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.bernoulli_.float:
            self.element_bytes[storage_id(result)] = result.itemsize
        return result


def _run(stage: StageModule, values: Mapping[str, Tensor], loss: Loss | None) -> LayerRun:
    constant = {storage_id(tensor) for tensor in (*stage.parameters(), *stage.buffers())}
    saved: dict[int, int] = {}
    kept: list[Tensor] = []  # so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        if storage_id(tensor) not in constant:
            saved[storage_id(tensor)] = tensor.untyped_storage().nbytes()
        kept.append(tensor.detach())
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), Noise() as noise:
        sent, output = stage(_leaves(stage, values))
        if loss is not None and stage.is_last:
            loss(output)
    output_bytes = sum(leaf.nbytes for leaf in flatten(output)[0] if isinstance(leaf, Tensor))
    seen = {storage_id(tensor) for tensor in (*values.values(), *sent.values())}
    own = {address: size for address, size in saved.items() if address not in seen}
    return LayerRun(
        {name: tensor.detach() for name, tensor in sent.items()},
        {address: size for address, size in saved.items() if address in seen},
        own_bytes=sum(own.values()),
        device_bytes=sum(size // noise.element_bytes.get(address, 1) for address, size in own.items()),
        output_bytes=output_bytes,
    )


@contextlib.contextmanager
def with_contents(stage: StageModule) -> Iterator[None]:
    """Hold random numbers in place of the weights of `stage` that are not here, within this context."""
    places = [(own, name) for part in stage.modules() for own in (part._parameters, part._buffers) for name in own]
    held = [(own, name, own[name]) for own, name in places]
    made: dict[int, Tensor] = {}
    for own, name, tensor in held:
        if tensor is None or fingerprint(tensor) is None:
            continue
        if id(tensor) not in made:
            real = stand_in(tensor.detach())
            made[id(tensor)] = nn.Parameter(real, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else real
        own[name] = made[id(tensor)]  # type: ignore[assignment]
    try:
        yield
    finally:
        for own, name, tensor in held:
            own[name] = tensor  # type: ignore[assignment]


def local_timer(spec: PlatformSpec) -> Measure:
    """Measure layers in this process, and divide by the vCPUs of each size of `spec`."""

    def measure(stage: StageModule, values: Mapping[str, Tensor], loss: Loss | None, repeats: int) -> Timing:
        here = measure_here(stage, values, loss, repeats)
        return lambda: [faster(here, size.vcpu) for size in spec.sizes]

    return measure


def faster(report: LayerReport, factor: float) -> LayerReport:
    """Return what would be measured on a machine that is `factor` times as fast."""
    forward_s, backward_s = (tuple(s / factor for s in kind) for kind in (report.forward_s, report.backward_s))
    return replace(report, forward_s=forward_s, backward_s=backward_s)


def measure_here(stage: StageModule, values: Mapping[str, Tensor], loss: Loss | None, repeats: int) -> LayerReport:
    """Time a layer in this process: one run to count its work, one to measure memory, then `repeats` timed ones.

    Output gradients are ones. As in training, gradients are accumulated in the parameters, and several forward passes
    precede their backward passes, so that the tensors they saved have left the processor's cache.
    """
    forward_work, backward_work = work_of(Trial(stage, values, loss))
    trial = Trial(stage, values, loss)
    _, forward_peak, kept = live_bytes(trial.forward)
    trial.make_output_gradients()
    _, backward_peak, left = live_bytes(trial.backward)
    workspace = max(forward_peak - max(kept, 0), backward_peak - max(left, 0))
    forward_s: list[float] = []
    backward_s: list[float] = []
    in_flight = min(repeats, 1 + _CACHE_BYTES // max(kept, 1))
    trials: deque[Trial] = deque()
    while len(forward_s) < repeats:
        for _ in range(min(in_flight, repeats - len(forward_s))):
            trials.append(Trial(stage, values, loss))
            forward_s.append(_seconds(trials[-1].forward))
        while trials:
            trials[0].make_output_gradients()
            backward_s.append(_seconds(trials.popleft().backward))
    return LayerReport(
        forward_s=tuple(forward_s),
        backward_s=tuple(backward_s),
        workspace_bytes=workspace,
        forward_work=forward_work,
        backward_work=backward_work,
    )


def work_of(trial: "Trial") -> tuple[Work, Work]:
    """Run a layer once, and return the work of its forward and of its backward."""
    with WorkCounter() as forward:
        trial.forward()
    trial.make_output_gradients()
    with WorkCounter() as backward:
        trial.backward()
    return forward.work, backward.work


class Trial:
    """One forward and backward pass of a layer: `forward`, `make_output_gradients`, `backward`, in this order."""

    def __init__(self, stage: StageModule, values: Mapping[str, Tensor], loss: Loss | None) -> None:
        self._stage = stage
        self._loss = loss if stage.is_last else None
        self._given = _leaves(stage, {**values, **{name: values[name].clone() for name in stage.receives}})

    def forward(self) -> None:
        """Run the layer, and keep its results and what it saves."""
        with torch.enable_grad():
            sent, output = self._stage(self._given)
            end = output if self._loss is None else self._loss(output)
            self._results = [*sent.values(), *flatten(end)[0]]

    def make_output_gradients(self) -> None:
        """Make the gradients that the backward pass starts from."""
        self._roots = [result for result in self._results if isinstance(result, Tensor) and result.requires_grad]
        self._gradients = [torch.ones_like(root) for root in self._roots]

    def backward(self) -> None:
        """Run the backward pass, which frees what the forward pass saved."""
        if self._roots:
            torch.autograd.backward(self._roots, self._gradients)


def _seconds(compute: Callable[[], None]) -> float:
    start = time.perf_counter()
    compute()
    return time.perf_counter() - start


def _leaves(stage: StageModule, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    given = {name: values[name] for name in stage.inputs}
    for name in stage.receives:
        given[name] = values[name].detach().requires_grad_(name in stage.differentiable)
    return given


T = TypeVar("T")


def live_bytes(compute: Callable[[], T]) -> tuple[T, int, int]:
    """Return the result of `compute`, and by how many bytes torch's memory in use grew: at its peak, and at the end."""
    profiler = torch.autograd.profiler.profile(profile_memory=True)
    with _stderr_discarded():
        profiler.__enter__()  # type: ignore[no-untyped-call]
    try:
        result = compute()
    finally:
        with _stderr_discarded():
            profiler.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    now = peak = 0
    recorded = profiler.kineto_results
    events: list[Any] = recorded.events() if recorded is not None else []
    for event in events:
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return result, peak, now


@contextlib.contextmanager
def _stderr_discarded() -> Iterator[None]:
    """Discard what the profiler's C++ code writes to standard error at any log level."""
    kept = os.dup(2)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


_START = (
    "import os, sys, torch\n"
    "import funcpipe.platforms.process, funcpipe.worker.attempt, funcpipe.worker.deferred_compiler\n"
)
_FORK = """
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""
_WORK = """
from funcpipe.platforms.process import peak_memory_bytes
from funcpipe.profiler.remote.exercise import exercise
funcpipe.worker.deferred_compiler.defer_compiler()
funcpipe.platforms.process.configure()
torch.set_num_threads(1)
exercise()
print(peak_memory_bytes())
"""


_MEASURING = threading.Lock()


def base_memory_bytes(*, forked: bool, modules: frozenset[str] = frozenset()) -> int:
    """Return the peak resident bytes of a function that imports `modules` and trains small networks of common layers,
    which touches the pages of torch's libraries that training needs.

    Functions are fresh processes, or `forked` from one that has loaded torch, as on the local platform; forked ones
    share pages, which are then not counted. Threads that ask at once wait for one measurement.
    """
    with _MEASURING:
        return _measured(forked, modules)


@functools.cache
def _measured(forked: bool, modules: frozenset[str]) -> int:
    imports = "".join(f"import {name}\n" for name in sorted(modules))
    code = _START + (_FORK if forked else "") + imports + _WORK
    command = [sys.executable, "-P", "-c", code]  # not with modules of the current folder, such as a platform.py
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        raise RunError(f"cannot measure the memory of an empty function: {done.stderr.strip()[-500:]}")
    return int(done.stdout)
