"""The state of the device that `tests.support.stand_in` gives a process: memory, copies, streams, random numbers.

DLPack lets a tensor of the host and one of the device share memory, so an operator can run on tensors of the host in
the place of those of the device.

Streams: what is computed is computed at once, as if the device were always ahead. A copy in another stream is made when
something waits for it, and until then its target holds NaN: a stage that forgets to wait computes with these. What such
a copy waited for of the computations is noted (`CROSSINGS`), for tests of what runs beside what. Memory that belongs to
a stream is refused in another one, unless that was recorded.
"""

import ctypes
import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

NAME = "standin"

_HOST, _DEVICE = 1, 12  # DLPack's numbers for kinds of devices


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


COUNTER = _Counter()


def copies() -> Copies:
    """Return what has been copied between host and device so far."""
    return COUNTER.read()


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
        self.after = 0
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
        if event.stream is computing():
            with self._lock:
                self.after = max(self.after, event.position)
        else:
            event.stream.reach(event.position)


@functools.cache
def computing() -> Stream:
    """Return the stream that computes."""
    return Stream()


_CURRENT = threading.local()


def current_stream() -> Stream:
    found: Stream = getattr(_CURRENT, "stream", None) or computing()
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

    def cudaHostRegister(self, place: int, size: int, flags: int) -> int:
        self._places.add(place)
        return 0

    def cudaHostUnregister(self, place: int) -> int:
        self._places.discard(place)
        return 0


PINNED = _Pinned()


class _RandomNumbers:
    """The device's random numbers, in the place of the host's while an operator draws."""

    def __init__(self) -> None:
        self.seed(0)

    def seed(self, seed: int) -> None:
        self.state = torch.Generator().manual_seed(seed).get_state()

    @contextmanager
    def in_use(self, operator: OpOverload) -> Iterator[None]:
        if torch.Tag.nondeterministic_seeded not in operator.tags or "attention" in str(operator):
            yield  # attention is without dropout, so other threads may seed and draw meanwhile
            return
        host = torch.default_generator.get_state()
        torch.default_generator.set_state(self.state)
        yield
        self.state = torch.default_generator.get_state()
        torch.default_generator.set_state(host)


RANDOM = _RandomNumbers()


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
            if current_stream() is not computing():
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
        self._streams.pop(on_host(tensor).untyped_storage().data_ptr(), None)


BLOCK_BYTES = 512
"""Memory is given in multiples of this, as CUDA's is."""

TOTAL_BYTES = 1 << 30
"""The memory of the device."""

MEMORY = _Memory()


class Module:
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
        return TOTAL_BYTES - MEMORY.bytes, TOTAL_BYTES

    def memory_allocated(self, device: Any = None) -> int:
        return MEMORY.bytes

    def max_memory_allocated(self, device: Any = None) -> int:
        return MEMORY.peak_bytes

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        MEMORY.peak_bytes = MEMORY.bytes

    def set_per_process_memory_fraction(self, fraction: float, device: Any = None) -> None:
        MEMORY.limit_bytes = int(fraction * TOTAL_BYTES)

    def cudart(self) -> _Pinned:
        return PINNED

    def check_error(self, found: int) -> None:
        assert not found

    Stream = Stream
    current_stream = staticmethod(current_stream)
    stream = staticmethod(_in_stream)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def manual_seed_all(self, seed: int) -> None:
        RANDOM.seed(seed)

    def get_rng_state(self, device: Any = None) -> Tensor:
        return RANDOM.state.clone()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        RANDOM.state = state.clone()


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


def on_device(tensor: Tensor) -> Tensor:
    MEMORY.hold(tensor)
    return _shared(tensor, _DEVICE)


def on_host(tensor: Tensor) -> Tensor:
    return _shared(tensor, _HOST)


def is_on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME
