"""The choices of a plan or a user: number formats, optimisers, recomputation, schedules, ways of synchronising."""

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from funcpipe.core import checks
from funcpipe.errors import InvalidValue


class Wire(Enum):
    """The number format in which tensors are sent.

    Only 32-bit floats are rounded; others travel as they are. In int8, 256 numbers share a scale, their largest divided
    by 127; if one of them is infinite or NaN, all 256 arrive as NaN.
    """

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    INT8 = "int8"

    @property
    def ratio(self) -> float:
        """Bytes on the wire for each byte of a 32-bit tensor; in int8, 256 numbers share a scale of 32 bits."""
        return {Wire.FP32: 1.0, Wire.BF16: 0.5, Wire.FP16: 0.5, Wire.INT8: (1 + 4 / 256) / 4}[self]

    @property
    def rounding(self) -> float:
        """The share of a 32-bit number that its last digit on the wire is; 0 if it travels as it is.

        In int8 it is the share of the largest of its block.
        """
        return {Wire.FP32: 0.0, Wire.BF16: 2.0**-7, Wire.FP16: 2.0**-10, Wire.INT8: 1 / 127}[self]

    @property
    def underflow(self) -> float:
        """The largest 32-bit number that arrives as 0 whatever is sent with it, and as -0.0 if it is negative; none
        does in int8, where -0.0 has a code of its own.
        """
        return {Wire.FP32: 0.0, Wire.BF16: 2.0**-134, Wire.FP16: 2.0**-25, Wire.INT8: 0.0}[self]


SYNC_WIRES = (Wire.FP32, Wire.BF16, Wire.INT8)
"""The formats in which gradients may be summed. They span more powers of two than fp16 has: many would be lost."""


class OptimizerKind(Enum):
    """Optimisers, by how many values they keep per parameter."""

    SGD = "sgd"
    MOMENTUM = "momentum"
    ADAM = "adam"

    @property
    def values_per_parameter(self) -> int:
        """The number of values that the optimiser keeps per parameter."""
        return {OptimizerKind.SGD: 0, OptimizerKind.MOMENTUM: 1, OptimizerKind.ADAM: 2}[self]

    def values_each(self, replicas: int, *, sharded: bool, averaged: bool = False) -> float:
        """Return the number of values that each replica of a stage keeps per parameter: all of the optimiser's, or its
        share if they are `sharded`, and one more if the parameters are `averaged` over steps.
        """
        return self.values_per_parameter / (replicas if sharded else 1) + averaged


class Interval(Enum):
    """The interval at which a learning-rate scheduler is stepped: each training step, or the end of each epoch."""

    STEP = "step"
    EPOCH = "epoch"


class Recompute(Enum):
    """The stages that may drop their activations and repeat their forward before their backward."""

    NEVER = "never"
    AUTO = "auto"


class ScheduleKind(Enum):
    """The order in which a stage runs the forwards and backwards of its micro-batches.

    `GPIPE` holds the activations of all micro-batches, `ONE_F_ONE_B` no more than keep all stages busy, and
    `EAGER_ONE_F_ONE_B` about twice as many, so that computation hides transfers too.
    """

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    EAGER_ONE_F_ONE_B = "eager-1f1b"


class Sync(Enum):
    """The ways in which the replicas of a stage sum their gradients through storage."""

    THREE_PHASE = "three-phase"
    PIPELINED = "pipelined"
    STREAMED = "streamed"
    EXCHANGE = "exchange"
    ALL_REDUCE = "all-reduce"
    HIERARCHICAL = "hierarchical"
    TREE = "tree"

    @property
    def shares_sums(self) -> bool:
        """True if each replica sums a part of the gradients for all others."""
        return self not in (Sync.EXCHANGE, Sync.ALL_REDUCE, Sync.TREE)

    def fed_back(self, replicas: int) -> float:
        """Return the most values per parameter that a replica keeps for sums in 8 bits: the rounding errors of what it
        sends, and of what it sums.
        """
        return 1 + (1 / replicas if self.shares_sums else 1.0)


class Precision(Enum):
    """The number format of the forward and the loss: `bf16` and `fp16` as under `torch.autocast`, parameters in fp32.

    With `fp16` the loss is scaled, as by torch.amp.GradScaler.
    """

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"

    @classmethod
    def named(cls, name: object) -> "Precision":
        """The precision of this name, or of a name that Lightning or Accelerate has for it. Raises InvalidValue."""
        known = {str(one.value): one for one in cls} | {"no": cls.FP32, "32": cls.FP32, "32-true": cls.FP32}
        known |= {"bf16-mixed": cls.BF16, "16": cls.FP16, "16-mixed": cls.FP16}
        if isinstance(name, cls):
            return name
        if str(name) in known:
            return known[str(name)]
        rule = f"must be one of {', '.join(str(one.value) for one in cls)}"
        if str(name).endswith("-true"):
            rule = (
                f"{rule}, in which parameters stay as the model has them; give a model in another format, model.to(…)"
            )
        raise InvalidValue("precision", name, rule)

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


@dataclass(frozen=True, slots=True)
class Streams:
    """The division of a streamed synchronisation: into `rounds`, each with raw objects for `groups` of readers.

    Each replica sends the sums of all rounds in `merged` objects. An exchange only has rounds, a hierarchical
    synchronisation only groups of readers. In a tree, each replica adds what up to `groups` others have put.
    """

    rounds: int
    groups: int
    merged: int

    def __post_init__(self) -> None:
        checks.all_at_least(self, 1, "rounds", "groups", "merged")


def usual_streams(sync: Sync, replicas: int, streams: Streams | None = None) -> Streams:
    """Return how `sync` divides the gradient among `replicas`: by `streams` where it applies, otherwise as usual."""
    one_each = max(replicas - 1, 1)
    match sync:
        case Sync.THREE_PHASE | Sync.PIPELINED:
            return Streams(rounds=1, groups=one_each, merged=1)
        case Sync.ALL_REDUCE:
            return Streams(rounds=1, groups=1, merged=1)
        case Sync.EXCHANGE:
            return Streams(rounds=8 if streams is None else streams.rounds, groups=1, merged=1)
        case Sync.STREAMED:
            chosen = Streams(rounds=2, groups=7, merged=2) if streams is None else streams
            return Streams(chosen.rounds, min(chosen.groups, one_each), min(chosen.merged, chosen.rounds))
        case Sync.HIERARCHICAL:
            wanted = OPEN_UPLOADS if streams is None else streams.groups
            return Streams(rounds=1, groups=min(wanted, max(members_of_group(replicas) - 1, 1)), merged=1)
        case Sync.TREE:
            chosen = Streams(rounds=4, groups=4, merged=4) if streams is None else streams
            return Streams(chosen.rounds, min(chosen.groups, one_each), merged=chosen.rounds)


@lru_cache
def members_of_group(replicas: int) -> int:
    """Return how many replicas form a group of a hierarchical synchronisation: the smallest divisor of `replicas` that
    is no smaller than its square root. All are one group where their number is prime.

    >>> [members_of_group(replicas) for replicas in (2, 8, 12, 128)]
    [2, 4, 4, 16]
    """
    return next(size for size in range(1, replicas + 1) if size * size >= replicas and replicas % size == 0)


def tree_depth(replicas: int, fan_in: int) -> int:
    """Return through how many other replicas' sums a contribution goes at most in a tree of so many replicas.

    >>> [tree_depth(replicas, fan_in=2) for replicas in (1, 2, 3, 4, 128)]
    [0, 1, 1, 2, 7]
    """
    depth, last = 0, replicas - 1
    while last > 0:
        depth, last = depth + 1, (last - 1) // fan_in
    return depth


OPEN_UPLOADS = 4
"""The number of puts that a function has open at once; only one of them moves its body, the others wait for theirs."""

_MOST_DOWNLOADS = 64  # connections of a client


def open_downloads(replicas: int) -> int:
    """Return how many gets of a replica may be open at once, so that a late object does not hold up the next rounds."""
    return min(4 * replicas, _MOST_DOWNLOADS)


@dataclass(frozen=True, slots=True)
class SyncWay:
    """A way of synchronising; `streams` as in `usual_streams`.

    >>> str(SyncWay(Sync.STREAMED, Streams(rounds=12, groups=1, merged=4)))
    'streamed 12/1/4'
    """

    sync: Sync
    streams: Streams | None = None

    def __str__(self) -> str:
        """Return the way and its counts: rounds, groups and merged objects, or the one that it has."""
        if self.streams is None:
            return self.sync.value
        counts = (self.streams.rounds, self.streams.groups, self.streams.merged)
        own = {Sync.EXCHANGE: counts[:1], Sync.HIERARCHICAL: counts[1:2], Sync.TREE: counts[:2]}.get(self.sync, counts)
        return f"{self.sync.value} {'/'.join(map(str, own))}"
