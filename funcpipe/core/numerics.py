"""Number formats of computing and of messages, and reactions to numbers that are not finite."""

from enum import Enum


class Precision(Enum):
    """The number format of the forward and the loss: `bf16` and `fp16` as under `torch.autocast`, parameters in fp32.

    With `fp16` the loss is scaled, as by torch.amp.GradScaler.
    """

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def rounding(self) -> float:
        """The relative size of a number's last digit, where that is more than fp32's; else 0."""
        return {Precision.FP32: 0.0, Precision.BF16: 2.0**-7, Precision.FP16: 2.0**-10}[self]

    @property
    def scales_loss(self) -> bool:
        """True if gradients would be lost unless the loss is scaled."""
        return self is Precision.FP16


class Numerics(Enum):
    """The planner's freedom in choosing wire formats.

    With `EXACT` they travel as asked, by default in 32 bits; with `BF16`, what was not asked to travel in 16 bits may
    travel in bf16. With `INT8`, messages and sums may besides travel in 8 bits.
    """

    EXACT = "exact"
    BF16 = "bf16"
    INT8 = "int8"


class OnNan(Enum):
    """The reaction to a loss or gradient of a step that is NaN or infinite.

    `STOP` ends the run and keeps what is saved; `SKIP` leaves the step out, in all stages; `IGNORE` goes on with
    such numbers, as plain PyTorch does.
    """

    STOP = "stop"
    SKIP = "skip"
    IGNORE = "ignore"


class Reduction(Enum):
    """The result of a loss function: a mean over samples, a sum and its weight, or a mean over targets.

    With `TOKENS` it is torch's mean over targets that are not ignored, or weighted by their classes.
    """

    MEAN = "mean"
    WEIGHTED = "weighted"
    TOKENS = "tokens"


class Coupled(Enum):
    """The reaction to a batch whose loss is not the mean of its micro-batches' losses.

    `REFUSE` starts nothing; `ACCUMULATE` trains on the mean of their losses, as gradient accumulation does; `CACHE`
    keeps outputs until all forwards are done, and computes the loss once, for the whole batch (gradient caching).
    """

    REFUSE = "refuse"
    ACCUMULATE = "accumulate"
    CACHE = "cache"
