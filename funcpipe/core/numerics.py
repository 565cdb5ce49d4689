"""The number formats that a model computes in and may travel in, and what follows when numbers are not finite."""

from enum import Enum


class Precision(Enum):
    """What the forward and the loss compute in: `bf16` and `fp16` as under `torch.autocast`, with parameters in fp32.

    With `fp16` the loss is scaled, as by torch.amp.GradScaler.
    """

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def rounding(self) -> float:
        """The share of a number that its last digit is, where that is more than fp32's; else 0."""
        return {Precision.FP32: 0.0, Precision.BF16: 2.0**-7, Precision.FP16: 2.0**-10}[self]

    @property
    def scales_loss(self) -> bool:
        """Whether gradients would be lost unless the loss is scaled."""
        return self is Precision.FP16


class Numerics(Enum):
    """How free the planner is with numbers that travel.

    With `EXACT` they travel as asked, by default in 32 bits; with `BF16`, what was not asked to travel in 16 bits may
    travel in bf16. With `INT8`, messages and sums may besides travel in 8 bits.
    """

    EXACT = "exact"
    BF16 = "bf16"
    INT8 = "int8"


class OnNan(Enum):
    """What follows when the loss or the gradient of a step is NaN or infinite.

    `STOP` ends the run and keeps what is saved; `SKIP` leaves the step out, in all stages alike; `IGNORE` goes on with
    such numbers, as plain PyTorch does.
    """

    STOP = "stop"
    SKIP = "skip"
    IGNORE = "ignore"


class Reduction(Enum):
    """What a loss function returns: a mean over samples, a sum and its weight, or a mean over targets.

    With `TOKENS` it is torch's mean over targets that are not ignored, or weighted by their classes.
    """

    MEAN = "mean"
    WEIGHTED = "weighted"
    TOKENS = "tokens"


class Coupled(Enum):
    """What follows where the loss of a batch is not the mean of its micro-batches' losses.

    `REFUSE` starts nothing; `ACCUMULATE` trains on the mean of their losses, as gradient accumulation does; `CACHE`
    keeps outputs until all forwards are done, and computes the loss once, for the whole batch (gradient caching).
    """

    REFUSE = "refuse"
    ACCUMULATE = "accumulate"
    CACHE = "cache"
