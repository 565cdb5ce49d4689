"""The problem to solve: the settings that a plan can have, the plan of chosen stages, and the report of a solver."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from funcpipe.core import (
    DEFAULT_STORES,
    NO_PINS,
    ModelProfile,
    Optimality,
    Pins,
    Plan,
    PlatformSpec,
    ScheduleKind,
    SolverReport,
    Stage,
    Stores,
    Streams,
    Sync,
    SyncWay,
    TrainingSpec,
    Wire,
)
from funcpipe.core.cached import cached_property
from funcpipe.core.rounds import AUTO
from funcpipe.errors import InvalidValue, PlanError
from funcpipe.partitioner.cost.evaluate import column_of, evaluate
from funcpipe.partitioner.cost.loads import Setting, meeting_share
from funcpipe.partitioner.cost.sync_choice import choose
from funcpipe.partitioner.problem.cuts import Borders, PlacedPins
from funcpipe.partitioner.problem.goal import GAP_OF_A_PROOF, Goal, goal_of
from funcpipe.partitioner.problem.stage_graph import EDGE_LIMIT, StageGraph, build_stage_graph, loose_stage_graph

SYNC_TIME_VALUES = (3.84, 245.76)
"""The least and the greatest of the paper's weights on time that are not 0, in dollars for a saved hour."""


@dataclass(frozen=True, slots=True)
class StageChoice:
    """One chosen stage: layers `first` up to `stop` on the platform's size number `size`, and its way of synchronising.

    None stands for the way of the setting.
    """

    first: int
    stop: int
    size: int
    recompute: bool
    way: SyncWay | None = None


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One planning problem: a profile on a platform, trained as asked, with what is pinned. Checked where it is made.

    `fitting` are the stages (first layer, layer behind the last) that fit some function, where that has been worked
    out. The stage graph has at most `edge_limit` edges. Plans use `stores`.

    Raises PlanError when batch, micro-batch and replicas do not divide, or a size was not measured; InvalidValue for
    pins and stores that name what does not exist, and for a joint loss of a profile that does not know the output.
    """

    profile: ModelProfile
    spec: PlatformSpec
    training: TrainingSpec
    pins: Pins = NO_PINS
    fitting: frozenset[tuple[int, int]] | None = None
    edge_limit: int = EDGE_LIMIT
    stores: Stores = DEFAULT_STORES

    def __post_init__(self) -> None:
        if self.training.sync_every == AUTO:
            raise InvalidValue("sync_every", AUTO, "must be a number of steps, or end, in a single problem")
        self.spec.stores_usd_h(self.stores)  # whether there are such stores
        for size in self.spec.sizes:
            column_of(size.name, self.profile)
        micro_batch, batch = self.profile.micro_batch, self.training.global_batch
        if batch % micro_batch:
            lower = batch // micro_batch * micro_batch
            nearest = (
                f"the nearest that are: {lower} and {lower + micro_batch}" if lower else f"the least: {micro_batch}"
            )
            raise PlanError(
                f"the global batch {batch} is not a multiple of the profile's micro-batch {micro_batch}; {nearest}"
            )
        asked = [set(degrees) for degrees in (self.training.replicas, self.pins.replicas) if degrees is not None]
        if self.profile.carried and not all(1 in degrees for degrees in asked):
            more = len(self.profile.carried) - 4
            names = ", ".join(self.profile.carried[:4]) + (f" and {more} more" if more > 0 else "")
            raise PlanError(
                f"{self.profile.model} trains with one replica only: each forward leaves {names} for the next one, so "
                "that micro-batches must follow each other; admit replicas=(1,)"
            )
        for degree in (*(self.training.replicas or ()), *(self.pins.replicas or ())):
            if self.micro_batches % degree:
                raise PlanError(
                    f"{degree} replicas cannot share {self.micro_batches} micro-batches of {micro_batch} evenly; "
                    f"possible degrees: {', '.join(map(str, _divisors(self.micro_batches)))}"
                )
        _ = self.placed, self._joint_bytes

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a global batch."""
        return self.training.global_batch // self.profile.micro_batch

    @property
    def max_functions(self) -> int:
        """How many functions may run at once."""
        return min(self.spec.max_functions, self.pins.max_functions or self.spec.max_functions)

    @property
    def degrees(self) -> tuple[int, ...]:
        """The numbers of replicas that may be chosen, in ascending order."""
        wanted = {1} if self.profile.carried else set(self.training.replicas or _divisors(self.micro_batches))
        if self.pins.replicas is not None:
            wanted &= set(self.pins.replicas)
        return tuple(sorted(degree for degree in wanted if degree <= self.max_functions))

    @property
    def shared_bytes_s(self) -> float | None:
        """As `PlatformSpec.shared_by`."""
        return self.spec.shared_by(self.stores)

    @cached_property
    def placed(self) -> PlacedPins:
        """The pins in terms of the profile's layers."""
        return PlacedPins(self.pins, self.profile, self.spec)

    @cached_property
    def borders(self) -> Borders:
        """The stages that plans can have, by the pins and the number of functions."""
        most = max(1, self.max_functions // min(self.degrees, default=1))
        return Borders.of(len(self.profile.layers), most=most, admits=self._admits)

    def _admits(self, first: int, stop: int) -> bool:
        return self.placed.admits(first, stop) and (self.fitting is None or (first, stop) in self.fitting)

    @cached_property
    def stage_graph(self) -> StageGraph:
        """Every way to cut the model; raises TooEntangled."""
        return build_stage_graph(self.profile, self.borders, edge_limit=self.edge_limit)

    @cached_property
    def loose_graph(self) -> StageGraph:
        """The stages that plans can have, with the least that they cost, however entangled the layers are."""
        return loose_stage_graph(self.profile, self.borders)

    @cached_property
    def goal(self) -> Goal:
        """The goal that the training asks for."""
        return goal_of(self.training, self.spec)

    def settings(self) -> tuple[Setting, ...]:
        """Every combination of replicas and schedule; unless one way of synchronising is asked for, each stage has its
        own.
        """
        return tuple(
            self.setting(degree, self.training.sync if degree > 1 else Sync.PIPELINED, schedule)
            for degree in self.degrees
            for schedule in self.schedules(degree)
        )

    def one_way_settings(self) -> tuple[Setting, ...]:
        """Every combination of replicas, schedule and one of a few ways of synchronising, the same for all stages: for
        solvers and policies that do not choose it with each stage.
        """
        return tuple(
            self.setting(degree, sync, schedule, streams)
            for degree in self.degrees
            for schedule in self.schedules(degree)
            for sync, streams in self.ways_to_synchronise(degree)
        )

    def ways_to_synchronise(self, replicas: int) -> tuple[tuple[Sync, Streams | None], ...]:
        """The way that is asked for; or those that suit a typical stage best, at two values of time.

        A typical stage has a quarter of the parameters and runs on the middle one of the sizes. The ways are the same
        whatever the goal; `mip.with_best_sync` chooses again, from all ways, for a plan that was found so.
        """
        if self.training.sync is not None or replicas == 1:
            return ((self.training.sync or Sync.PIPELINED, None),)
        size, store = self.spec.sizes[len(self.spec.sizes) // 2], self.spec.store(self.stores.sums)
        most = math.inf if store.bytes_s is None else store.bytes_s
        quarter = self.profile.summed_bytes(0, len(self.profile.layers)) / 4 / self.training.sync_fragments
        ratio, sharded = self.training.wire_sync.ratio, self.training.shard_optimizer
        chosen = [
            choose(
                ratio * quarter,
                replicas,
                merged_bytes=quarter if sharded else None,
                up=min(size.upload_bytes_s, most),
                down=min(size.download_bytes_s, most),
                price_usd_s=size.price_usd_s,
                spec=store,
                time_value=value,
                sharded=sharded,
            )
            for value in SYNC_TIME_VALUES
        ]
        return tuple(dict.fromkeys((choice.sync, choice.streams) for choice in chosen))

    @property
    def compared_ways(self) -> int | None:
        """The most of these ways for any number of replicas; None where the way is given, or nothing is summed."""
        if self.training.sync is not None or self.degrees == (1,):
            return None
        return max((len(self.ways_to_synchronise(replicas)) for replicas in self.degrees), default=None)

    def schedules(self, replicas: int) -> tuple[ScheduleKind, ...]:
        """The schedules to choose from with this many replicas, simplest first.

        A single micro-batch has no order, and before a joint loss come all forwards.
        """
        if self.training.schedule is not None:
            return (self.training.schedule,)
        one_order = self.training.joint_loss or self.micro_batches == replicas
        return (ScheduleKind.GPIPE,) if one_order else tuple(ScheduleKind)

    def setting(
        self, replicas: int, sync: Sync | None, schedule: ScheduleKind, streams: Streams | None = None
    ) -> Setting:
        """The setting of plans with this number of replicas, way to synchronise (None: each its own) and
        schedule.
        """
        sharded = self.training.shard_optimizer and replicas > 1
        return Setting(
            micro_batches=self.micro_batches,
            replicas=replicas,
            values_per_parameter=self.training.values_each(replicas) + self._fed_back(replicas, sync),
            sync=sync,
            wire_ratio=self.training.wire.ratio,
            gradient_wire_ratio=None if self.training.wire_back is None else self.training.wire_back.ratio,
            sync_wire_ratio=self.training.wire_sync.ratio,
            base_bytes=self.profile.base_memory_bytes,
            spec=self.spec,
            schedule=schedule,
            streams=streams,
            sharded=sharded,
            data=self.profile.data,
            stores=self.stores,
            joint_bytes=self._joint_bytes,
            alone=self.training.trains_locally and replicas > 1,
            meeting_share=meeting_share(self.training.sync_every, replicas, self.training.sync_fragments),
            fragments=self.training.sync_fragments if replicas > 1 else 1,
            codec=self.spec.codecs.get(self.training.wire_sync.value),
            delay=self.training.sync_delay if replicas > 1 else 0,
        )

    @property
    def _joint_bytes(self) -> int | None:
        return self.profile.joint_bytes if self.training.joint_loss else None

    def _fed_back(self, replicas: int, sync: Sync | None) -> float:
        """How many values per parameter functions keep for sums in 8 bits: the most that any way needs."""
        if replicas == 1 or self.training.wire_sync is not Wire.INT8:
            return 0.0
        return max(self.training.kept_errors(way, replicas) for way in ((sync,) if sync else Sync))

    def plan(self, setting: Setting, choices: Sequence[StageChoice]) -> Plan:
        """The plan of `choices`, with its estimate."""
        names = [layer.graph_layers for layer in self.profile.layers]
        ways = [setting.way if choice.way is None else choice.way for choice in choices]
        common = max(ways, key=ways.count)
        stages = tuple(
            Stage(
                first=choice.first,
                stop=choice.stop,
                size=self.spec.sizes[choice.size].name,
                memory_mb=self.spec.sizes[choice.size].memory_mb,
                recompute=choice.recompute,
                layers=tuple(name for parts in names[choice.first : choice.stop] for name in parts),
                sync=None if way == common else way.sync,
                streams=None if way == common else way.streams,
            )
            for choice, way in zip(choices, ways, strict=True)
        )
        plan = Plan(
            **(self.training.base_fields | {"stores": self.stores}),
            micro_batch=self.profile.micro_batch,
            replicas=setting.replicas,
            schedule=setting.schedule,
            sync=common.sync,
            streams=common.streams,
            stages=stages,
            model=self.profile.model,
            platform=self.spec.name,
            region=self.spec.region,
            prices_note=self.spec.prices_note(self.stores),
            blocks=self.profile.blocks,
            precision=self.profile.precision,
        )
        return replace(plan, estimate=evaluate(plan, self.profile, self.spec))


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(divisor for divisor in range(1, number + 1) if number % divisor == 0)


def report(
    plan: Plan, problem: Problem, *, name: str, bound: float | None, solve_s: float, one_way: bool = False
) -> Plan:
    """`plan` with the report of the solver `name`, which proved that no plan of `problem` is below `bound`.

    With `one_way` the proof covers the few ways to synchronise that all stages share (`Problem.one_way_settings`).
    """
    objective = problem.goal.of_plan(plan)
    bound = None if bound is None else max(0.0, bound)  # no objective is negative, whatever a solver has proved
    gap = None if bound is None else max(0.0, (objective - bound) / objective) if objective > 0 else 0.0
    proved = gap is not None and gap <= GAP_OF_A_PROOF
    solver = SolverReport(
        name=name,
        status=Optimality.OPTIMAL if proved else Optimality.FEASIBLE,
        objective=objective,
        gap=gap,
        solve_s=solve_s,
        bound=bound,
        sync_ways=problem.compared_ways if one_way else None,
    )
    return replace(plan, solver=solver)
