"""A device that computes as this processor does, and on which nothing works that a GPU would refuse.

Its tensors lie in memory that the host's operators cannot reach: an operator that is given a tensor of each fails, but
for numbers of the host (tensors without dimensions), as on CUDA. What is copied each way is counted, and so is what it
holds, which is limited. It has random numbers of its own. It is torch's PrivateUse1 backend, so
`torch.accelerator` finds it, autograd runs its backwards in a thread of the device, and optimisers choose the kernels
that they choose on GPUs.

How it works: DLPack lets a tensor of the host and one of the device share memory, so an operator runs on tensors of the
host in the place of those of the device.

Streams: what is computed is computed at once, as if the device were always ahead. A copy in another stream is made when
something waits for it, and until then its target holds NaN: a stage that forgets to wait computes with these. What such
a copy waited for of the computations is noted (`CROSSINGS`), for tests of what runs beside what. Memory that belongs to
a stream is refused in another one, unless that was recorded.

A process has the device for good, and from before its first backward. So tests `on_stand_in` run in a process of their
own, which they share.
"""

import ctypes
import functools
import importlib
import multiprocessing
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

NAME = "standin"

_HOST, _DEVICE = 1, 12  # DLPack's numbers for kinds of devices

_F = TypeVar("_F", bound=Callable[..., None])


@dataclass
class Copies:
    """How often something was copied, and how many bytes, in each direction."""

    to_device: int = 0
    to_device_bytes: int = 0
    to_host: int = 0
    to_host_bytes: int = 0

    def __sub__(self, other: "Copies") -> "Copies":
        return Copies(**{name: number - getattr(other, name) for name, number in vars(self).items()})


class _Counter:
    def __init__(self) -> None:
        self._copies, self._lock = Copies(), threading.Lock()

    def add(self, tensor: Tensor, *, to_host: bool) -> None:
        found, size = self._copies, tensor.numel() * tensor.element_size()
        with self._lock:
            if to_host:
                found.to_host += 1
                found.to_host_bytes += size
            else:
                found.to_device += 1
                found.to_device_bytes += size

    def read(self) -> Copies:
        with self._lock:
            return replace(self._copies)


_COUNTER = _Counter()


def copies() -> Copies:
    """Return what has been copied between host and device so far."""
    return _COUNTER.read()


@dataclass(frozen=True)
class Crossing:
    """A copy in a stream of its own, which waited for the first `after` operators of those `asked` for by then."""

    to_host: bool
    after: int
    asked: int


CROSSINGS: list[Crossing] = []


class Event:
    """A point in a stream."""

    def __init__(self, stream: "Stream", position: int) -> None:
        self.stream, self.position = stream, position

    def synchronize(self) -> None:
        self.stream.reach(self.position)


class Stream(torch.Stream):
    """Copies in the order in which they were asked for, or for the stream that computes the number of operators."""

    def __new__(cls) -> "Stream":
        return super().__new__(cls, device=torch.device(NAME, 0))

    def __init__(self) -> None:
        self.asked = 0
        self._waiting: deque[Callable[[], None]] = deque()
        self._after = 0
        self._lock = threading.RLock()

    def ask(self, copy: Callable[[], None] | None = None) -> None:
        with self._lock:
            self.asked += 1
            if copy is not None:
                self._waiting.append(copy)

    def reach(self, position: int) -> None:
        with self._lock:
            while self._waiting and self.asked - len(self._waiting) < position:
                self._waiting.popleft()()

    def record_event(self) -> Event:  # type: ignore[override]
        return Event(self, self.asked)

    def wait_event(self, event: Event) -> None:  # type: ignore[override]
        if event.stream is _computing():
            with self._lock:
                self._after = event.position
        else:
            event.synchronize()

    def note(self, *, to_host: bool) -> None:
        CROSSINGS.append(Crossing(to_host, self._after, _computing().asked))


@functools.cache
def _computing() -> Stream:
    """Return the stream that computes."""
    return Stream()


_CURRENT = threading.local()


def current_stream() -> Stream:
    found: Stream = getattr(_CURRENT, "stream", None) or _computing()
    return found


@contextmanager
def _in_stream(stream: Stream) -> Iterator[None]:
    before = current_stream()
    _CURRENT.stream = stream
    try:
        yield
    finally:
        _CURRENT.stream = before


class _Pinned:
    """The memory of the host that the device can reach."""

    def __init__(self) -> None:
        self._places: set[int] = set()

    def hold(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._places.add(storage.data_ptr())
        weakref.finalize(storage, self._places.discard, storage.data_ptr())
        return tensor

    def holds(self, tensor: Tensor, device: Any = None) -> bool:
        return tensor.untyped_storage().data_ptr() in self._places


_PINNED = _Pinned()


class _RandomNumbers:
    """The device's random numbers, in the place of the host's while an operator draws."""

    def __init__(self) -> None:
        self.seed(0)

    def seed(self, seed: int) -> None:
        self.state = torch.Generator().manual_seed(seed).get_state()

    @contextmanager
    def in_use(self, operator: OpOverload) -> Iterator[None]:
        if torch.Tag.nondeterministic_seeded not in operator.tags:
            yield
            return
        host = torch.default_generator.get_state()
        torch.default_generator.set_state(self.state)
        yield
        self.state = torch.default_generator.get_state()
        torch.default_generator.set_state(host)


_RANDOM = _RandomNumbers()


class _Memory:
    """What tensors hold of the device's memory, at most a share of `TOTAL_BYTES`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a tensor may go while another is counted
        self._held: dict[int, int] = {}
        self._streams: dict[int, Stream] = {}
        self.bytes = self.peak_bytes = 0
        self.limit_bytes = TOTAL_BYTES

    def hold(self, tensor: Tensor) -> None:
        """Count the memory of a tensor of the host, which is the device's from now on, until nothing refers to it."""
        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        with self._lock:
            if not size or place in self._held:
                return
            if self.bytes + size > self.limit_bytes:
                raise torch.OutOfMemoryError(f"{NAME} out of memory: {self.bytes} and {size} of {self.limit_bytes}")
            self._held[place] = size
            if current_stream() is not _computing():
                self._streams[place] = current_stream()
            self.bytes += size
            self.peak_bytes = max(self.peak_bytes, self.bytes)
        weakref.finalize(storage, self._free, place)

    def _free(self, place: int) -> None:
        with self._lock:
            self.bytes -= self._held.pop(place)
            self._streams.pop(place, None)

    def check(self, tensor: Tensor) -> None:
        """Refuse memory that belongs to another stream."""
        if self._streams.get(tensor.untyped_storage().data_ptr(), current_stream()) is not current_stream():
            raise RuntimeError("memory of another stream could be used again before this one is done with it")

    def record_stream(self, tensor: Tensor, stream: torch.Stream) -> None:
        self._streams.pop(_on_host(tensor).untyped_storage().data_ptr(), None)


BLOCK_BYTES = 512
"""Memory is given in multiples of this, as CUDA's is."""

TOTAL_BYTES = 1 << 30
"""The memory of the device."""

_MEMORY = _Memory()


class _Module:
    """What `torch.standin` has, as `torch.cuda` does."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return TOTAL_BYTES - _MEMORY.bytes, TOTAL_BYTES

    def memory_allocated(self, device: Any = None) -> int:
        return _MEMORY.bytes

    def max_memory_allocated(self, device: Any = None) -> int:
        return _MEMORY.peak_bytes

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        _MEMORY.peak_bytes = _MEMORY.bytes

    def set_per_process_memory_fraction(self, fraction: float, device: Any = None) -> None:
        _MEMORY.limit_bytes = int(fraction * TOTAL_BYTES)

    Stream = Stream
    current_stream = staticmethod(current_stream)
    stream = staticmethod(_in_stream)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def manual_seed_all(self, seed: int) -> None:
        _RANDOM.seed(seed)

    def get_rng_state(self, device: Any = None) -> Tensor:
        return _RANDOM.state.clone()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        _RANDOM.state = state.clone()


class _Capsule(ctypes.Structure):
    """The beginning of a DLTensor."""

    _fields_ = (("data", ctypes.c_void_p), ("kind", ctypes.c_int32), ("number", ctypes.c_int32))


_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def _shared(tensor: Tensor, kind: int) -> Tensor:
    """Return a tensor of the other device in the memory of `tensor`."""
    capsule = torch._C._to_dlpack(tensor.detach())
    head = _Capsule.from_address(_pointer_of(capsule, b"dltensor"))
    head.kind, head.number = kind, 0
    return torch._C._from_dlpack(capsule)


def _on_device(tensor: Tensor) -> Tensor:
    _MEMORY.hold(tensor)
    return _shared(tensor, _DEVICE)


def _on_host(tensor: Tensor) -> Tensor:
    return _shared(tensor, _HOST)


def _is_on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


def _run(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run `operator` on tensors of the host that share the memory of the device's."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    stands_for: dict[int, Tensor] = {}
    for i, leaf in enumerate(leaves):
        if _is_on_device(leaf):
            leaves[i] = _on_host(leaf) if leaf.numel() else torch.empty(leaf.shape, dtype=leaf.dtype)
            _MEMORY.check(leaves[i])
            stands_for[id(leaves[i])] = leaf
        elif isinstance(leaf, Tensor) and leaf.dim():
            raise RuntimeError(f"{operator}: expected all tensors on {NAME}, but found one on {leaf.device}")
        elif isinstance(leaf, torch.device):
            leaves[i] = torch.device("cpu")
    current_stream().ask()
    shared, named = pytree.tree_unflatten(leaves, tree)
    with _RANDOM.in_use(operator):
        found = operator(*shared, **named)
    for leaf in leaves:
        if id(leaf) in stands_for and leaf.shape != stands_for[id(leaf)].shape:
            _resize(stands_for[id(leaf)], leaf)
    infos = [returned.alias_info for returned in operator._schema.returns]
    if any(info is not None and not info.is_write for info in infos):
        base = next(iter(stands_for.values()))
        return pytree.tree_map_only(Tensor, lambda made: _view(base, made), found)

    def moved(made: Tensor) -> Tensor:
        return stands_for[id(made)] if id(made) in stands_for else _on_device(made)

    return pytree.tree_map_only(Tensor, moved, found)


_AS_ON_HOST = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
"""For operators that change nothing but the form of a tensor, whose kernels for the host do for any device."""


def _view(base: Tensor, like: Tensor) -> Tensor:
    """Return the view of `base` that has the form and place of `like`, a tensor of the host in the same memory."""
    offset = (like.data_ptr() - base.untyped_storage().data_ptr()) // like.element_size() if like.numel() else 0
    return _as_strided(base, like.shape, like.stride(), offset)


def _as_strided(base: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Tensor:
    found: Tensor = torch.ops.aten.as_strided.default.redispatch(_AS_ON_HOST, base, size, stride, offset)
    return found


def _resize(tensor: Tensor, like: Tensor) -> None:
    """Give an empty tensor that an operator has written to the memory that it wrote."""
    made, set_ = _on_device(like), torch.ops.aten.set_.source_Storage_storage_offset
    set_.redispatch(_AS_ON_HOST, tensor, made.untyped_storage(), 0, made.shape, made.stride())


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if _is_on_device(target) is not _is_on_device(source):
        _COUNTER.add(source, to_host=_is_on_device(source))
    into, values = (_on_host(tensor) if _is_on_device(tensor) else tensor for tensor in (target, source))
    stream, to_host = current_stream(), _is_on_device(source)
    if stream is _computing():
        into.copy_(values)
        return target
    if not non_blocking or not _PINNED.holds(into if to_host else values):
        raise RuntimeError("a copy in a stream of its own would hold the processor up")
    into.fill_(float("nan") if into.is_floating_point() else 1)

    def copy() -> None:
        stream.note(to_host=to_host)
        into.copy_(values)

    stream.ask(copy)
    return target


def _empty_like(
    tensor: Tensor,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: bool | None = None,
    memory_format: Any = None,
) -> Tensor:
    made = torch.empty_like(_on_host(tensor), dtype=dtype, memory_format=memory_format or torch.preserve_format)
    if device is None or device.type == NAME:
        return _on_device(made)
    return _PINNED.hold(made) if pin_memory else made


def _pin(tensor: Tensor, device: Any = None) -> Tensor:
    return _PINNED.hold(tensor.clone())


def _number(tensor: Tensor) -> Any:
    _COUNTER.add(tensor, to_host=True)
    return _on_host(tensor).item()


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
    return _on_device(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return _on_device(torch.empty_strided(size, stride, dtype=dtype))


def _arange(start: Any, stop: Any = None, step: Any = 1, *, dtype: Any = None, **_: Any) -> Tensor:
    first, end = (0, start) if stop is None else (start, stop)
    return _on_device(torch.arange(first, end, step, dtype=dtype))


def _convolution_backward(gradient: Tensor, inputs: Tensor, weight: Tensor, *rest: Any) -> Any:
    transposed, groups = rest[3], rest[5]
    bias = [weight.shape[1] * groups if transposed else weight.shape[0]]
    return _run(torch.ops.aten.convolution_backward.default, gradient, inputs, weight, bias, *rest)


_WITH_KERNELS = (
    *("native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward"),
    "native_dropout",
)
"""Operators for which GPUs have kernels, and devices that torch does not know take them apart."""


class _Attention(torch.autograd.Function):
    """Attention by one kernel, which keeps no probabilities, as that of GPUs."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Any, scale: Any) -> Tensor:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        output, logsumexp = _run(kernel, query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.options = causal, mask, scale
        found: Tensor = output
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        causal, mask, scale = ctx.options
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        found = _run(kernel, gradient, *ctx.saved_tensors, 0.0, causal, attn_mask=mask, scale=scale)
        return *found, None, None, None


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    assert not dropout_p, "the processor's kernel draws nothing"
    assert not enable_gqa, "the processor's kernel has as many keys as queries"
    found: Tensor = _Attention.apply(query, key, value, is_causal, attn_mask, scale)  # type: ignore[no-untyped-call]
    return found


_IN_BF16 = ("linear", "matmul", "conv2d", "scaled_dot_product_attention")
_IN_FP32 = ("layer_norm", "cross_entropy_loss")
"""Operators that autocast casts for, as CUDA's does: see torch.amp's documentation."""

_AUTOCAST = torch._C._parse_dispatch_key("AutocastPrivateUse1")


def _cast(operator: OpOverload, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    """Run an operator on its tensors of 32 or 16 bits as `dtype`, or as what autocast casts to."""
    wanted = dtype or torch.get_autocast_dtype(NAME)

    def cast(value: Tensor) -> Tensor:
        return value.to(wanted) if value.is_floating_point() else value

    args, kwargs = pytree.tree_map_only(Tensor, cast, (args, kwargs))
    assert _AUTOCAST is not None
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_AUTOCAST)):
        return operator(*args, **kwargs)


def install() -> None:
    """Give this process the device."""
    torch.set_num_threads(1)
    backend_registration._setup_privateuseone_for_python_backend(NAME, _Module())
    _computing()
    torch.__future__.set_swap_module_params_on_conversion(True)  # `to` keeps parameters the objects that they are
    library: Any = torch.library.Library
    everything, aten = library("_", "IMPL"), library("aten", "IMPL")
    everything.fallback(_run, "PrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    kernels: dict[str, Callable[..., Any]] = {
        "copy_": _copy,
        "_local_scalar_dense": _number,
        "empty.memory_format": _empty,
        "empty_strided": _empty_strided,
        "as_strided": _as_strided,
        "empty_like": _empty_like,
        "record_stream": _MEMORY.record_stream,
        "arange": _arange,
        "arange.start": _arange,
        "arange.start_step": _arange,
        **{name: functools.partial(_run, getattr(torch.ops.aten, name).default) for name in _WITH_KERNELS},
        "convolution_overrideable": functools.partial(_run, torch.ops.aten.convolution.default),
        "convolution_backward_overrideable": _convolution_backward,
    }
    for name, kernel in kernels.items():
        aten.impl(name, kernel, "PrivateUse1")
    aten.impl("_pin_memory", _pin, "CPU")
    aten.impl("is_pinned", _PINNED.holds, "CPU")
    aten.impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1")
    for name in _IN_BF16:
        aten.impl(name, functools.partial(_cast, getattr(torch.ops.aten, name).default), "AutocastPrivateUse1")
    for name in _IN_FP32:
        cast = functools.partial(_cast, getattr(torch.ops.aten, name).default, dtype=torch.float32)
        aten.impl(name, cast, "AutocastPrivateUse1")
    _INSTALLED.extend((everything, aten))


_INSTALLED: list[torch.library.Library] = []


def on_stand_in(test: _F) -> _F:
    """Run `test` in a process that has the device."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        _process().submit(_call, test.__module__, test.__name__, args, kwargs).result()

    return run  # type: ignore[return-value]


@functools.cache
def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=install)


def _call(module: str, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    try:
        getattr(importlib.import_module(module), name).__wrapped__(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - whatever it is, the test's process may not have its class
        raise AssertionError("".join(traceback.format_exception(error))) from None
