"""Accelerators, and how long they take for a layer by the roofline model (Williams, Waterman and Patterson, 2009)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from funcpipe.core import checks
from funcpipe.core.choices import Precision
from funcpipe.core.json_form import IF_CHANGED
from funcpipe.errors import InvalidValue

ARITHMETIC, MEMORY = 0.9, 0.5
"""The shares of their published rates that devices achieve. By these, ResNet-50 trains at 336 images/s on a V100 in
FP32 and at 990 on an A100 in TF32; 367 and 938 were measured (github.com/NVIDIA/DeepLearningExamples, ResNet50 v1.5 for
PyTorch, container 21.03).
"""

CONTEXT_MB = 512
"""What a process takes of an accelerator's memory before it holds any tensor: the CUDA context, and the kernels and
workspaces of its libraries. An assumption until measured; 723 MiB were seen when all kernels were loaded at once
(second-hand: discuss.pytorch.org/t/73021, 2020), since CUDA 11.7 they are as they are called.
"""

_RATES = ("fp32_tflop_s", "bf16_tflop_s", "memory_gb_s", "host_device_gb_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The arithmetic of a layer, forward or backward, for one micro-batch.

    `flop` are the floating-point operations of products of matrices, convolutions and attention, which read and write
    `dense_bytes`; all other operators together read and write `other_bytes`.
    """

    flop: int
    dense_bytes: int
    other_bytes: int

    def __post_init__(self) -> None:
        checks.all_at_least(self, 0, "flop", "dense_bytes", "other_bytes")


def total(parts: Iterable[Work | None]) -> Work | None:
    """Return the sum of `parts`; None if the work of one is not known."""
    every = tuple(parts)
    known = [part for part in every if part is not None]
    if len(known) < len(every):
        return None
    return Work(
        flop=sum(part.flop for part in known),
        dense_bytes=sum(part.dense_bytes for part in known),
        other_bytes=sum(part.other_bytes for part in known),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """A model of GPU: its memory, and its published rates: 10^12 operations and 10^9 bytes a second.

    `fp32_tflop_s` is that of TF32 where the device has it. `bf16_tflop_s` is None for a device without bfloat16
    arithmetic, which computes at the rate of FP32. `host_device_gb_s` is what copies from and to pinned memory of the
    host reach, each way. `vcpu_equivalents` is how many virtual processors train ResNet-50 in FP32 as fast: the
    estimate where rates are not known, or a profile in which no `Work` was counted.
    """

    name: str
    memory_mb: int
    vcpu_equivalents: float
    fp32_tflop_s: float | None = None
    bf16_tflop_s: float | None = None
    memory_gb_s: float | None = None
    host_device_gb_s: float | None = field(default=None, metadata=IF_CHANGED)

    def __post_init__(self) -> None:
        checks.all_positive(self, "memory_mb", "vcpu_equivalents", *_RATES)

    @classmethod
    def measured(cls, name: str, *, flop_s: float, bytes_s: float, memory_mb: int) -> "Accelerator":
        """A device that was seen to do so many operations, and to move so many bytes, a second."""
        return cls(
            name=name,
            memory_mb=memory_mb,
            vcpu_equivalents=1.0,
            fp32_tflop_s=flop_s / 1e12 / ARITHMETIC,
            memory_gb_s=bytes_s / 1e9 / MEMORY,
        )

    def part(self, parts: int) -> "Accelerator":
        """Return one of so many equal parts of the device, which share its memory and its rates."""
        rates = {name: rate / parts for name in _RATES if (rate := getattr(self, name)) is not None}
        vcpu = self.vcpu_equivalents / parts
        return replace(self, memory_mb=self.memory_mb // parts, vcpu_equivalents=vcpu, **rates)

    def seconds(self, work: Work, precision: Precision) -> float | None:
        """Return the seconds that `work` takes: products are bound by arithmetic or by memory, the rest by memory.
        None where rates are not known.
        """
        if self.fp32_tflop_s is None or self.memory_gb_s is None:
            return None
        tflop_s = self.fp32_tflop_s if precision is Precision.FP32 else self.bf16_tflop_s or self.fp32_tflop_s
        flop_s, bytes_s = ARITHMETIC * 1e12 * tflop_s, MEMORY * 1e9 * self.memory_gb_s
        return max(work.flop / flop_s, work.dense_bytes / bytes_s) + work.other_bytes / bytes_s


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorTable:
    """Models of accelerators, and dollars for an hour of a machine with one of them, as dated data."""

    FORMAT: ClassVar[str] = "funcpipe.accelerators/1"

    name: str
    as_of: str
    source: str
    accelerators: tuple[Accelerator, ...]
    usd_h: Mapping[str, float]
    sources: Mapping[str, str]

    def __post_init__(self) -> None:
        if self.usd_h.keys() != {accelerator.name for accelerator in self.accelerators}:
            raise InvalidValue("usd_h", sorted(self.usd_h), "must have an entry for each accelerator, and no other")
