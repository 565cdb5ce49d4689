"""Functions that measure a platform or the layers of a model: their payload and their reports."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from funcpipe.core import checks


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSpec:
    """The payload of a function that measures the `layers` with these numbers, or the platform if there are none.

    The function starts no measurement after `time_s`. `code` gives the SHA-256 of the bundle of each layer.
    """

    FORMAT: ClassVar[str] = "funcpipe.probe/1"

    run: str
    number: int
    size: str
    memory_mb: int
    storage: str
    platform: str
    time_s: float
    repeats: int = 1
    layers: tuple[int, ...] = ()
    code: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        checks.filled("run", self.run)
        checks.at_least("number", self.number, 0)
        checks.at_least("memory_mb", self.memory_mb, 1)
        checks.at_least("repeats", self.repeats, 1)
        checks.positive("time_s", self.time_s)

    @property
    def worker(self) -> str:
        """The function's short name."""
        return f"probe{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReport:
    """The measurements of a function of one size: its link to the storage, its memory, its processors.

    `one_thread_s` and `all_threads_s` are the seconds per matrix product with one thread, and with as many threads as
    the function sees processors.
    """

    FORMAT: ClassVar[str] = "funcpipe.machine/1"

    started_at_s: float
    latency_s: float
    upload_bytes_s: float
    download_bytes_s: float
    base_memory_bytes: int
    one_thread_s: float
    all_threads_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport:
    """Seconds of each timed forward and backward of a layer, and the bytes that it needs only while it runs."""

    FORMAT: ClassVar[str] = "funcpipe.layer/1"

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    workspace_bytes: int
