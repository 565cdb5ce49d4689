"""Predictions of an iteration: the cost model gives each task's time, the simulator runs the tasks.

Replicas that train alone have two kinds of steps: those of a round that end without a meeting, and its last one. A
trace is that of the last one; `mean_step_s` plays both.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from funcpipe.analysis.payloads import payloads, routes_of
from funcpipe.comm.collectives import pattern_of
from funcpipe.core import (
    ModelProfile,
    Plan,
    PlatformSpec,
    Resource,
    Trace,
    Wire,
    prices_of,
    worker_name,
)
from funcpipe.core.texts import spread_prefix
from funcpipe.partitioner.cost import Array
from funcpipe.partitioner.cost.evaluate import column_of, plan_loads, plan_setting
from funcpipe.partitioner.cost.formulas import crossing_link, lane_times
from funcpipe.partitioner.cost.loads import Loads, Setting, meeting_share
from funcpipe.partitioner.cost.rounding import addition_s, all_s, group_addition_s
from funcpipe.partitioner.cost.stores import largest_shares, link
from funcpipe.partitioner.cost.sync_ways import sum_crossing
from funcpipe.scheduler.graph import StepShape
from funcpipe.scheduler.late import LatePart
from funcpipe.scheduler.pipeline import Loading
from funcpipe.scheduler.simulator.costs import Cost, Timeline, costs_of
from funcpipe.scheduler.simulator.disturbances import UNDISTURBED, Disturbances
from funcpipe.scheduler.simulator.folded_graph import FoldedGraph
from funcpipe.scheduler.simulator.request_queues import BURST_S, StepLimits
from funcpipe.scheduler.simulator.simulate import play_folded
from funcpipe.scheduler.tasks import GETS, PUTS, RESOURCES, Kind, Task

_SUMS = frozenset(
    {
        *(Kind.PUT_SPLIT, Kind.GET_SPLIT, Kind.PUT_MERGED, Kind.GET_MERGED),
        *(Kind.PUT_TIED, Kind.GET_TIED, Kind.PUT_TIED_SUM, Kind.GET_TIED_SUM),
    }
)
"""The tasks that move sums of gradients, which the cost model counts with the synchronisation."""

_OUTPUTS = frozenset({Kind.PUT_OUTPUTS, Kind.GET_OUTPUTS})
"""The tasks that also copy what they move between host and accelerator."""


def predict(
    plan: Plan,
    profile: ModelProfile,
    spec: PlatformSpec,
    *,
    disturbances: Disturbances = UNDISTURBED,
    clipped: bool = False,
) -> Trace:
    """The trace of one iteration of `plan`; takes the arguments of `forecast` and raises the same errors.

    Where replicas train alone, it is one that ends with a meeting.
    """
    timeline = forecast(plan, profile, spec, disturbances=disturbances, clipped=clipped)
    return replace(timeline.trace(run=f"prediction of {plan.model}"), prices=prices_of(plan, spec))


def forecast(
    plan: Plan,
    profile: ModelProfile,
    spec: PlatformSpec,
    *,
    disturbances: Disturbances = UNDISTURBED,
    clipped: bool = False,
    meets: bool = True,
    fragment: int = 0,
    beside: int | None = None,
) -> Timeline:
    """The times of all tasks of one iteration of `plan`; contention and shared limits come from `spec`.

    Where replicas train alone, they meet at its end unless `meets` is false, on a fragment if there are several. A late
    meeting goes on beside it, as a whole, or as in the step with the number `beside` after its measuring. With
    `clipped`, gradients are clipped by their norm, so all stages exchange norms before they update. Raises PlanError
    unless plan, profile and platform belong together.
    """
    shape = step_shape(plan, profile, spec, clipped=clipped, meets=meets, fragment=fragment, beside=beside)
    folded = FoldedGraph.of(shape)
    costs = costs_of(folded.graph, task_cost(plan, profile, spec, meets=meets), uniform=True)
    caps = tuple(spec.store(name).shared_bytes_s for name in _stores_of(plan))
    disturbed = replace(disturbances, contention=spec.contention, shared_bytes_s=caps, shared_cores=spec.shared_cores)
    return play_folded(folded, costs, disturbances=disturbed, limits=request_limits(folded, plan, spec))


def request_limits(folded: FoldedGraph, plan: Plan, spec: PlatformSpec) -> StepLimits | None:
    """The queues in which requests of `plan` wait for their stores: for each prefix, and for all of an account.

    None if no more is asked for than comes in at once.
    """
    names, tasks = _stores_of(plan), folded.graph.tasks
    stores = [spec.store(name) for name in names]
    asked = Counter((task.kind, names.index(_store_of(task, plan))) for task in tasks if _is_request(task))
    for number, store in enumerate(stores):
        puts, gets = (folded.mirrors * sum(asked[kind, number] for kind in kinds) for kinds in (PUTS, GETS))
        rates = ((puts, store.puts_s), (gets, store.gets_s), (puts + gets, store.requests_s))
        if any(rate is not None and count > rate * BURST_S for count, rate in rates):
            break
    else:
        return None
    numbers: dict[str, int] = {}
    prefixes = [
        [numbers.setdefault(spread_prefix(worker_name(i, r)), len(numbers)) for r in range(plan.replicas)]
        for i in range(len(plan.stages))
    ]
    found: dict[tuple[int, ...], int] = {}
    interval_s: list[float] = []

    def queues_of(rate: float | None, *which: int, count: int) -> int:
        if rate is None:
            return -1
        if which not in found:
            found[which] = len(interval_s)
            interval_s.extend([1 / rate] * count)
        return found[which]

    queues: list[tuple[int, int]] = []
    for task in tasks:
        if not _is_request(task):
            queues.append((-1, -1))
            continue
        number, is_put = names.index(_store_of(task, plan)), task.kind in PUTS
        store = stores[number]
        below = queues_of(store.puts_s if is_put else store.gets_s, number, is_put, count=len(numbers))
        queues.append((below, queues_of(store.requests_s, number, count=1)))
    below, of_store = np.array(queues).T
    return StepLimits(below=below, of_store=of_store, prefixes=np.array(prefixes), interval_s=interval_s)


def _is_request(task: Task) -> bool:
    return task.kind in PUTS or task.kind in GETS


def _store_of(task: Task, plan: Plan) -> str:
    """The store that a request of `task` goes to."""
    return plan.stores.sums if task.kind in _SUMS else plan.stores.messages


def mean_step_s(
    plan: Plan,
    profile: ModelProfile,
    spec: PlatformSpec,
    *,
    disturbances: Disturbances = UNDISTURBED,
    clipped: bool = False,
    met_s: float | None = None,
) -> float:
    """The mean seconds of the iterations of a round of `plan`; takes the arguments of `forecast`.

    An iteration that ends with a meeting takes `met_s`, if that is known.
    """
    played = partial(forecast, plan, profile, spec, disturbances=disturbances, clipped=clipped)
    if met_s is None:
        met_s = played().duration_s
    if not plan.trains_locally:
        return met_s
    alone_s, delay, fragments = played(meets=False).duration_s, plan.sync_delay, plan.sync_fragments
    share = meeting_share(plan.sync_every, plan.replicas, fragments)

    def longer_s(fragment: int) -> float:
        """By how much all the iterations take longer of which a meeting is part."""
        if delay > 1:
            return sum(played(fragment=fragment, beside=i).duration_s - alone_s for i in range(delay))
        return (played(fragment=fragment).duration_s if fragment else met_s) - alone_s

    first_s = longer_s(0)
    if fragments > 1 and routes_of(plan, profile).ties:  # which meet with the first fragment
        first_s = (first_s + (fragments - 1) * longer_s(1)) / fragments
    return alone_s + share * first_s


def _stores_of(plan: Plan) -> tuple[str, ...]:
    """The stores that tasks use, by their numbers: that of messages, and that of sums if it is another one."""
    return tuple(dict.fromkeys((plan.stores.messages, plan.stores.sums)))


def step_shape(
    plan: Plan,
    profile: ModelProfile,
    spec: PlatformSpec,
    *,
    clipped: bool = False,
    meets: bool = True,
    fragment: int = 0,
    beside: int | None = None,
) -> StepShape:
    """The shape of a step of `plan`, at whose end replicas that train alone meet or not, on `fragment` of several; or
    `beside` which they do, as in `forecast`.
    """
    late, delay = None, plan.sync_delay
    if meets and delay and plan.trains_locally:
        late = LatePart(fragment, delay, beside or 0, delay - 1 if beside is None else beside)
    return StepShape(
        stages=len(plan.stages),
        replicas=plan.replicas,
        micro_batches=plan.micro_batches,
        routes=routes_of(plan, profile),
        schedule=plan.schedule,
        sync=plan.sync,
        streams=plan.streams,
        ways=plan.ways,
        joint_loss=plan.joint_loss,
        alone=plan.trains_locally,
        meets=meets and late is None,
        late=late,
        fragments=(fragment,) if plan.trains_locally and plan.sync_fragments > 1 else (),
        norms=clipped or plan.gradient_wire is Wire.FP16 or plan.precision.scales_loss,
        loading=_loading(plan, profile),
        accelerated=frozenset(number for number, stage in enumerate(plan.stages) if spec.accelerates(stage.size)),
    )


def _loading(plan: Plan, profile: ModelProfile) -> Loading | None:
    if profile.data is None:
        return None
    stages = [number for number, stage in enumerate(plan.stages) if profile.loads_data(stage.first, stage.stop)]
    return Loading(stages=frozenset(stages), following=plan.micro_batches)


def task_cost(plan: Plan, profile: ModelProfile, spec: PlatformSpec, *, meets: bool = True) -> Callable[[Task], Cost]:
    """The cost of each task of `plan` when nothing disturbs it; as in the cost model, updates and sums are free, but
    the rounding of sums is not. Replicas that train alone meet after the step if `meets`.
    """
    alone = replace(spec.unshared(), contention=1.0, shared_cores=None)
    loads = plan_loads(plan, profile, spec)
    setting = plan_setting(plan, profile, alone)
    lanes = lane_times(loads, setting, workers=plan.workers)
    payload = payloads(plan, profile)
    rounding = [_StageRounding.of(plan, profile, setting, loads, i) for i in range(len(plan.stages))]
    parts_s = _parts_of_backwards(plan, profile, lanes.backward_s, [each.beside_s for each in rounding])
    sums = plan.replicas > 1 and (meets or not plan.trains_locally)

    load_s = 0.0 if profile.data is None else profile.data.load_s
    processors = loads.processors.tolist()
    names = _stores_of(plan)
    stores = [alone.store(name) for name in names]
    links = [(link(loads, store, plan.workers), crossing_link(loads, store, plan.workers)) for store in stores]
    crossing = sum_crossing(loads, setting)
    crossing_s = crossing.tied_s + (crossing.summed_s / max(setting.delay, 1) if sums else 0.0)

    def cost(task: Task) -> Cost:
        if task.kind is Kind.LOAD:
            return Cost(load_s)
        if task.kind is Kind.FORWARD:
            return Cost(float(lanes.forward_s[task.stage]), processors=processors[task.stage])
        if task.kind is Kind.BACKWARD and task.part is None:
            return Cost(float(lanes.backward_s[task.stage]), processors=processors[task.stage])
        if task.kind in (Kind.BACKWARD, Kind.BUCKET):
            assert task.part is not None, "a part of a backward has a number"
            return Cost(parts_s[task.stage][task.part], processors=processors[task.stage])
        if task.kind is Kind.MERGE:
            assert task.part is not None, "merges are numbered"
            return Cost(rounding[task.stage].of_merge(task.part))
        if task.kind is Kind.UPDATE:
            read_s = rounding[task.stage].read_s if sums else 0.0
            return Cost(read_s + float(crossing_s[task.stage]), processors=processors[task.stage])
        if RESOURCES[task.kind] in (Resource.TO_HOST, Resource.TO_DEVICE):
            size = payload(task)
            return Cost(float(size / loads.host_device_bytes_s[task.stage]), size)
        if not _is_request(task):
            return Cost(0.0)
        size = payload(task)
        encode_s = rounding[task.stage].encode_s * size if task.kind is Kind.PUT_SPLIT else 0.0
        number = names.index(_store_of(task, plan))
        bytes_s = links[number][task.kind in _OUTPUTS][0 if task.kind.is_put else 1]
        poll_s = stores[number].poll_s if task.kind.is_get else 0.0
        return Cost(stores[number].latency_s + encode_s, size, float(bytes_s[task.stage]), number, poll_s=poll_s)

    return cost


@dataclass(frozen=True, slots=True)
class _StageRounding:
    """Seconds of the rounding of a stage's sums: for a byte of a contribution before it goes, to sum a piece over all
    and over a group, to read the last sum, and by which that of a round prolongs the backward that it runs beside.
    """

    encode_s: float = 0.0
    merge_s: float = 0.0
    merge_group_s: float = 0.0
    rounds: int = 1
    read_s: float = 0.0
    beside_s: float = 0.0

    @staticmethod
    def of(plan: Plan, profile: ModelProfile, setting: Setting, loads: Loads, number: int) -> "_StageRounding":
        """That of a stage of `plan` by its number."""
        stage, chosen, way = plan.stages[number], pattern_of(plan, number), plan.ways[number].sync
        rounding = setting.rounding(float(loads.vcpu[number]))
        if rounding is None or plan.replicas == 1:
            return _StageRounding()
        summed = setting.exchanged_bytes(profile.summed_bytes(stage.first, stage.stop))
        size, sums = setting.sync_wire_ratio * summed, setting.merged_wire_ratio * summed
        share = chosen.piece_share
        _, last = largest_shares(plan.ways[number], plan.replicas)
        fan_in = chosen.streams.groups
        all_each_s = all_s(way, size, sums, plan.replicas, rounding, fan_in) / chosen.streams.rounds
        return _StageRounding(
            encode_s=float(rounding.encode_s),
            merge_s=float(addition_s(way, share * size, share * sums, plan.replicas, rounding, fan_in)),
            merge_group_s=float(group_addition_s(way, share * size, plan.replicas, rounding, fan_in)),
            rounds=chosen.streams.rounds,
            read_s=float(rounding.decode_sum_s * last * sums),
            beside_s=float(rounding.lost * all_each_s),
        )

    def of_merge(self, part: int) -> float:
        """Seconds of a merge: those of rounds come first, then that of a group."""
        return self.merge_s if part < self.rounds else self.merge_group_s


def _parts_of_backwards(
    plan: Plan, profile: ModelProfile, backward_s: Array, beside_s: Sequence[float]
) -> list[list[float]]:
    """The seconds of the parts of each stage's last backward; each part completes a round of gradients, and each but
    the first one takes `beside_s` longer, as a round is summed beside it.

    Recomputation comes first, then the layers from the last to the first, each of which makes its gradients evenly.
    """
    found = []
    for i, (stage, total_s) in enumerate(zip(plan.stages, backward_s.tolist(), strict=True)):
        rounds = pattern_of(plan, i).streams.rounds
        layers = profile.layers[stage.first : stage.stop][::-1]
        seconds = [layer.backward_s[column_of(stage.size, profile)] for layer in layers]
        ends_s = np.cumsum([max(0.0, total_s - sum(seconds)), *seconds])
        made = np.cumsum([0, *(layer.parameter_bytes for layer in layers)])
        complete_s = [_reached(made[-1] * (q + 1) / rounds, made, ends_s) for q in range(rounds - 1)]
        parts_s = np.diff(np.minimum([0.0, *complete_s, total_s], total_s))  # sums may be rounded up
        parts_s[1:] += beside_s[i]
        found.append(parts_s.tolist())
    return found


def _reached(wanted: float, made: Array, ends_s: Array) -> float:
    """The time when `made`, which never falls, reaches `wanted`; from one of `ends_s` to the next it grows evenly."""
    i = int(np.searchsorted(made, wanted))
    if i == 0:
        return float(ends_s[0])
    share = (wanted - made[i - 1]) / (made[i] - made[i - 1])
    return float(ends_s[i - 1] + share * (ends_s[i] - ends_s[i - 1]))
