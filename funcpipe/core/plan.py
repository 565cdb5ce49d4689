"""The training that is wanted (TrainingSpec), and the plan for it (Plan)."""

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from funcpipe.core import checks
from funcpipe.core.choices import (
    SYNC_WIRES,
    Numerics,
    OptimizerKind,
    Precision,
    Recompute,
    ScheduleKind,
    Streams,
    Sync,
    SyncWay,
    Wire,
)
from funcpipe.core.estimate import Estimate, Optimality, SolverReport
from funcpipe.core.json_form import IF_CHANGED
from funcpipe.core.plan_request import PlanRequest
from funcpipe.core.round_checks import check_meetings, check_sync_every, check_unused
from funcpipe.core.rounds import AUTO, END
from funcpipe.core.stores import DEFAULT_STORES, Stores
from funcpipe.core.texts import Described
from funcpipe.errors import InvalidValue


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanBase:
    """The part of a training that is wanted which its plan has unchanged. Choices may be given as strings.

    Activations travel as `wire`, the gradients of activations as `wire_back`, or else as activations do; what replicas
    contribute to sums of gradients, and the sums, as `wire_sync`. With `shard_optimizer`, the state of the optimiser is
    divided over replicas: each keeps that of the split that it sums, and sends updated parameters in place of sums.
    `averaged` says that an average of the parameters over steps is kept, which is one more copy of them. With
    `joint_loss`, the loss is computed once for the whole global batch, as with `coupled="cache"`: all its forwards come
    first, under GPipe's schedule, and each replica of the last stage computes the loss from outputs that replicas
    exchange. `stores` may be given as `Stores.of` takes it.

    With `sync_every` other than 1, replicas train alone and meet after so many steps, or with "end" in the end alone
    (`core.rounds`). In a meeting they go `outer_lr` of the way to their mean, with the Nesterov momentum
    `outer_momentum`. The parameters of each stage meet in `sync_fragments` parts, at different steps. What they meet on
    reaches them `sync_delay` steps later, so that it travels while they train.
    """

    SYNC_WORDS: ClassVar[tuple[str, ...]] = (END,)

    global_batch: int
    optimizer: OptimizerKind = OptimizerKind.SGD
    wire: Wire = Wire.FP32
    wire_back: Wire | None = None
    wire_sync: Wire = Wire.FP32
    shard_optimizer: bool = False
    averaged: bool = False
    joint_loss: bool = False
    stores: Stores = DEFAULT_STORES
    sync_every: int | str = field(default=1, metadata=IF_CHANGED)
    outer_lr: float = field(default=1.0, metadata=IF_CHANGED)
    outer_momentum: float = field(default=0.0, metadata=IF_CHANGED)
    sync_fragments: int = field(default=1, metadata=IF_CHANGED)
    sync_delay: int = field(default=0, metadata=IF_CHANGED)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stores", Stores.of(self.stores))
        checks.choose(self, "optimizer", OptimizerKind)
        for name in ("wire", "wire_back", "wire_sync"):
            checks.choose(self, name, Wire, optional=name == "wire_back")
        checks.whole("global_batch", self.global_batch, 1)
        if self.wire_sync not in SYNC_WIRES:
            known = ", ".join(wire.value for wire in SYNC_WIRES)
            raise InvalidValue("wire_sync", self.wire_sync.value, f"must be one of {known}")
        _check_local_steps(self)

    @property
    def trains_locally(self) -> bool:
        """True if replicas train alone between meetings, if there are several."""
        return self.sync_every != 1

    def values_each(self, replicas: int) -> float:
        """Return the number of values that each of so many replicas keeps per parameter: for its optimiser, for an
        average, and for meetings.

        Replicas that train alone update all of their parameters: `shard_optimizer` divides what they keep for meetings.
        """
        sharded, alone = self.shard_optimizer and replicas > 1, self.sync_every != 1 and replicas > 1
        values = self.optimizer.values_each(replicas, sharded=sharded and not alone, averaged=self.averaged)
        return values + self.kept_for_meetings(replicas)

    def kept_for_meetings(self, replicas: int) -> float:
        """Return how many of these are for meetings: the parameters of the last one, and the outer momentum's; divided
        over replicas, a share of each, and of the mean that a replica makes. Of a fragment that is late, what was
        measured, too.
        """
        if self.sync_every == 1 or replicas == 1:
            return 0
        kept = 1 + (self.outer_momentum > 0)
        return (kept + 1) / replicas if self.shard_optimizer else kept + self._late_share

    @property
    def _late_share(self) -> float:
        """The share of what replicas keep that they keep twice, while a meeting goes on beside steps."""
        return 1 / self.sync_fragments if self.sync_delay else 0.0

    def kept_errors(self, sync: Sync, replicas: int) -> float:
        """Return how many values per parameter each replica keeps for sums in 8 bits that it makes by `sync`."""
        return sync.fed_back(replicas) * (1 + self._late_share)

    @property
    def base_fields(self) -> dict[str, Any]:
        """The fields of this class, as keywords for another one with them."""
        return {item.name: getattr(self, item.name) for item in fields(PlanBase)}

    @property
    def gradient_wire(self) -> Wire:
        """The wire format of the gradients that stages return."""
        return self.wire_back or self.wire


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSpec(PlanBase):
    """The training that the user wants, and its worth.

    `time_value` is what a saved hour is worth in dollars; `deadline_s` and `budget_usd` hold for one iteration, and
    at most one of the two is given. `replicas` restricts the degrees of data parallelism; None admits all that divide
    the batch. Where `schedule` or `sync` is None, the best is chosen. With `numerics` bf16 or int8, what would travel
    in 32 bits may travel in fewer, where that is better. `stores` says which of the platform's stores plans may use; by
    default they use its default store alone. With `sync_every` "auto", the best number of at most `sync_every_at_most`
    is chosen.
    """

    FORMAT: ClassVar[str] = "funcpipe.training/1"
    SYNC_WORDS: ClassVar[tuple[str, ...]] = (END, AUTO)

    numerics: Numerics = Numerics.EXACT
    recompute: Recompute = Recompute.AUTO
    schedule: ScheduleKind | None = None
    sync: Sync | None = None
    replicas: tuple[int, ...] | None = None
    time_value: float = 0.0
    deadline_s: float | None = None
    budget_usd: float | None = None
    sync_every_at_most: int | None = field(default=None, metadata=IF_CHANGED)

    def __post_init__(self) -> None:
        PlanBase.__post_init__(self)
        checks.all_whole(self, 1, "sync_every_at_most")
        if (self.sync_every == AUTO) is (self.sync_every_at_most is None):
            rule = f"must be given with sync_every={AUTO!r}, and with that alone"
            raise InvalidValue("sync_every_at_most", self.sync_every_at_most, rule)
        if self.sync_every_at_most is not None:
            _check_meetings(self, self.sync_every_at_most)
        checks.choose(self, "numerics", Numerics)
        checks.choose(self, "recompute", Recompute)
        checks.choose(self, "schedule", ScheduleKind, optional=True)
        checks.choose(self, "sync", Sync, optional=True)
        checks.at_least("time_value", self.time_value, 0)
        for i, degree in enumerate(self.replicas or ()):
            checks.whole(f"replicas[{i}]", degree, 1)
        checks.all_positive(self, "deadline_s", "budget_usd")
        if self.deadline_s is not None and self.budget_usd is not None:
            raise InvalidValue("budget_usd", self.budget_usd, "cannot be given together with deadline_s")
        if self.joint_loss:
            _check_joint(self.schedule)
        if self.wire_sync is Wire.INT8:
            _check_unscaled(self.gradient_wire)
        if self.shard_optimizer:
            _check_sharding(self.sync, self.gradient_wire)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The layers `first` up to, but not including, `stop`, and the size of the functions that run them.

    `layers` names the layers of the model's graph, and `parameter_bytes` is what their trainable parameters take, each
    counted once; so a plan can be checked against a model without its profile. `constant_bytes` are those of all else
    that a function of the stage reads when it starts. Older plans do not know these.
    Where `sync` is given, the stage's replicas sum their gradients in that way, with those `streams`; else in the
    plan's.
    """

    first: int
    stop: int
    size: str
    memory_mb: int
    recompute: bool = False
    layers: tuple[str, ...] = ()
    parameter_bytes: int | None = None
    constant_bytes: int | None = None
    sync: Sync | None = None
    streams: Streams | None = None

    def __post_init__(self) -> None:
        checks.choose(self, "sync", Sync, optional=True)
        if self.streams is not None and self.sync is None:
            raise InvalidValue("streams", self.streams, "must be left out where sync is")
        checks.whole("first", self.first, 0)
        checks.whole("stop", self.stop, self.first + 1)
        checks.whole("memory_mb", self.memory_mb, 1)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan(Described, PlanBase):
    """The cuts of a model, the functions and replicas of its stages, and the prediction for them.

    Micro-batch m belongs to replica m mod `replicas` of every stage. `streams` cuts a streamed synchronisation or an
    exchange; None stands for the usual cut. Stages may have ways of synchronising of their own (`ways`). `blocks` and
    `precision` as in profiles; `stores` are those that it uses. `made_for` is what was asked for when the plan was
    made, and `request` what it was chosen from; plans by hand or of old may lack them, and those that functions are
    given lack the latter. Its prices are those of `region`, by default the one of the platform's specification, except
    for what `prices_note` says.
    """

    FORMAT: ClassVar[str] = "funcpipe.plan/1"

    micro_batch: int
    replicas: int
    schedule: ScheduleKind
    sync: Sync
    wire: Wire
    stages: tuple[Stage, ...]
    model: str = ""
    platform: str = ""
    streams: Streams | None = None
    estimate: Estimate | None = None
    solver: SolverReport | None = None
    blocks: tuple[str, ...] = ()
    precision: Precision = Precision.FP32
    made_for: TrainingSpec | None = None
    request: PlanRequest | None = None
    region: str = ""
    prices_note: str = ""

    def __post_init__(self) -> None:
        PlanBase.__post_init__(self)
        checks.choose(self, "schedule", ScheduleKind)
        checks.choose(self, "sync", Sync)
        checks.all_whole(self, 1, "micro_batch", "replicas")
        if self.global_batch % (self.micro_batch * self.replicas):
            rule = f"must be a multiple of micro_batch x replicas = {self.micro_batch} x {self.replicas}"
            raise InvalidValue("global_batch", self.global_batch, rule)
        checks.filled("stages", self.stages)
        expected = 0
        for i, stage in enumerate(self.stages):
            if stage.first != expected:
                rule = f"must be {expected}, where the stage before stops"
                raise InvalidValue(f"stages[{i}].first", stage.first, rule)
            expected = stage.stop
        if self.joint_loss:
            _check_joint(self.schedule)
        if self.feeds_back:
            _check_unscaled(self.gradient_wire, self.precision)
        if self.is_sharded:
            for way in self.ways:
                _check_sharding(way.sync, self.gradient_wire)

    @property
    def ways(self) -> tuple[SyncWay, ...]:
        """The way of synchronising of each stage."""
        whole = SyncWay(self.sync, self.streams)
        return tuple(whole if stage.sync is None else SyncWay(stage.sync, stage.streams) for stage in self.stages)

    @property
    def synchronisation(self) -> str:
        """The way of synchronising in words, or that of each stage."""
        ways = dict.fromkeys(map(str, self.ways))
        return next(iter(ways)) if len(ways) == 1 else ", ".join(f"{i}: {way}" for i, way in enumerate(self.ways))

    @property
    def trains_locally(self) -> bool:
        """True if there are replicas that train alone between meetings."""
        return self.replicas > 1 and self.sync_every != 1

    @property
    def sums_gradients(self) -> bool:
        """True if there are replicas that sum their gradients in every step."""
        return self.replicas > 1 and not self.trains_locally

    @property
    def meetings(self) -> str:
        """How often replicas meet, in words."""
        if isinstance(self.sync_every, str):
            return "replicas train alone and meet in the end"
        if self.sync_every == 1:
            return "replicas meet in every step"
        parts = f" in {self.sync_fragments} fragments" if self.sync_fragments > 1 else ""
        late = f", {self.sync_delay} late" if self.sync_delay else ""
        return f"replicas meet every {self.sync_every} steps{parts}{late}"

    @property
    def loss_of(self) -> str:
        """The samples whose loss is computed at a time, in words."""
        return "whole global batches" if self.joint_loss else "micro-batches"

    @property
    def is_proved(self) -> bool:
        """True if a search ended with the proof that no other plan is better."""
        return self.solver is not None and self.solver.status is Optimality.OPTIMAL

    @property
    def is_sharded(self) -> bool:
        """True if there are replicas over which the optimiser's state is divided."""
        return self.shard_optimizer and self.replicas > 1

    @property
    def divides_optimizer(self) -> bool:
        """True if each replica updates a part of the parameters only; those that train alone update all of theirs."""
        return self.is_sharded and not self.trains_locally

    @property
    def values_per_parameter(self) -> float:
        """The number of values that each function keeps for a parameter, besides itself and its gradient."""
        kept = max(self.kept_errors(way.sync, self.replicas) for way in self.ways) if self.feeds_back else 0.0
        return self.values_each(self.replicas) + kept

    @property
    def feeds_back(self) -> bool:
        """True if replicas keep the rounding errors of their sums."""
        return self.replicas > 1 and self.wire_sync is Wire.INT8

    @property
    def saved_values(self) -> tuple[float, float]:
        """Values for a parameter in a checkpoint: of a stage's first replica, with the model, and of each other one."""
        own = self.values_per_parameter - self.values_each(self.replicas) + self.trains_locally
        divided = self.optimizer.values_each(self.replicas, sharded=self.divides_optimizer)
        own += divided if self.is_sharded or self.trains_locally else 0
        kept = self.kept_for_meetings(self.replicas)
        if self.is_sharded and self.trains_locally:
            own, kept = own + kept - 1 / self.replicas, 0  # without the mean, which is made in a meeting
        first = 1 + self.averaged + own + (0 if self.is_sharded or self.trains_locally else divided)
        return first + max(kept - 1, 0), own

    @property
    def merged_wire(self) -> Wire:
        """The wire format of the sums that a replica makes for others, or of the updated parameters in their place."""
        return Wire.FP32 if self.is_sharded else self.wire_sync

    @property
    def wires(self) -> tuple[Wire, ...]:
        """All formats in which numbers travel."""
        return self.wire, self.gradient_wire, self.wire_sync if self.replicas > 1 else Wire.FP32

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a full global batch, all replicas together."""
        return self.global_batch // self.micro_batch

    @property
    def workers(self) -> int:
        """Functions that run at once."""
        return len(self.stages) * self.replicas


def _check_joint(schedule: ScheduleKind | None) -> None:
    """Raise InvalidValue unless all forwards come before the first backward, which waits for the loss of the batch."""
    if schedule not in (None, ScheduleKind.GPIPE):
        raise InvalidValue("schedule", schedule.value, "must be gpipe with joint_loss, as with coupled='cache'")


def _check_local_steps(base: PlanBase) -> None:
    """Raise InvalidValue unless replicas may train alone as `base` says, and meet."""
    check_sync_every(base.sync_every, base.SYNC_WORDS)
    checks.positive("outer_lr", base.outer_lr)
    checks.at_least("outer_momentum", base.outer_momentum, 0)
    if base.sync_every == 1:
        for name, usual in (("outer_lr", 1), ("outer_momentum", 0), ("sync_fragments", 1), ("sync_delay", 0)):
            check_unused(name, getattr(base, name), usual)
        return
    _check_meetings(base, base.sync_every)
    if base.joint_loss:
        raise InvalidValue("sync_every", base.sync_every, "must be 1 with a loss of whole global batches")
    if base.averaged:
        raise InvalidValue("sync_every", base.sync_every, "must be 1 with an average of the parameters after each step")
    if base.gradient_wire is Wire.FP16:
        raise InvalidValue("wire_back", base.gradient_wire.value, "must be fp32, bf16 or int8 with local steps")
    if base.shard_optimizer and base.wire_sync is not Wire.FP32:
        rule = "must be fp32 with local steps and shard_optimizer: replicas then send parameters, not differences"
        raise InvalidValue("wire_sync", base.wire_sync.value, rule)


def _check_meetings(base: PlanBase, steps: int | str) -> None:
    check_meetings(steps, fragments=base.sync_fragments, delay=base.sync_delay, sharded=base.shard_optimizer)


def _check_unscaled(gradient_wire: Wire, precision: Precision = Precision.FP32) -> None:
    """Raise InvalidValue if sums are in 8 bits and the loss is scaled: the kept errors have the scale of this step."""
    if gradient_wire is Wire.FP16:
        raise InvalidValue("wire_back", gradient_wire.value, "must be fp32, bf16 or int8 with sums in int8")
    if precision.scales_loss:
        raise InvalidValue("wire_sync", Wire.INT8.value, f"must be fp32 or bf16 with the precision {precision.value}")


def _check_sharding(sync: Sync | None, gradient_wire: Wire) -> None:
    """Raise InvalidValue if the optimiser cannot be divided. fp16 may skip a step after replicas have begun it."""
    if sync is not None and not sync.shares_sums:
        rule = f"must be one of {', '.join(way.value for way in Sync if way.shares_sums)} with shard_optimizer"
        raise InvalidValue("sync", sync.value, rule)
    if gradient_wire is Wire.FP16:
        raise InvalidValue("wire_back", gradient_wire.value, "must be fp32, bf16 or int8 with shard_optimizer")
