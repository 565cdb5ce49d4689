"""Why a plan is as it is: memory and lanes of each stage, the limits that bind, and what other choices would cost."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from funcpipe.core import MB, NO_PINS, DeviceMemory, ModelProfile, Pins, Plan, PlatformSpec, TrainingSpec
from funcpipe.core.rounds import AUTO
from funcpipe.core.stores import DEFAULT, KINDS
from funcpipe.core.texts import STAGE_PREFIXES
from funcpipe.partitioner import PLANNED_LAYERS
from funcpipe.partitioner.alternatives import second_best
from funcpipe.partitioner.cost.evaluate import evaluate
from funcpipe.partitioner.local_steps import RoundChoice, round_choices
from funcpipe.partitioner.optimize import merged_problem, optimize, unmerged
from funcpipe.partitioner.problem.goal import meeting_every
from funcpipe.partitioner.problem.problem import Problem

_NEAR = 0.98
"""A limit that is used to at least this share counts as binding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another plan: by how much its seconds, dollars and objective exceed those of the plan explained."""

    what: str
    more_s: float
    more_usd: float
    worse_by: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Smaller:
    """A stage on the next smaller size: the megabytes that it lacks there, or what would change."""

    size: str
    lacks_mb: float
    change: Alternative | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageExplanation:
    """One stage: layers, bytes by what takes them, and busy seconds of its lanes in one iteration.

    On a function with an accelerator, base, synchronisation buffers (with the copies that checkpoints make), messages
    and data are on the host, all else on the `device`.
    """

    layers: tuple[str, ...]
    size: str
    memory_mb: int
    recompute: bool
    base_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    sync_buffer_bytes: int
    constant_bytes: int
    activation_bytes: int
    workspace_bytes: int
    waste_bytes: int
    compute_s: float
    upload_s: float
    download_s: float
    sync_s: float
    smaller: Smaller | None
    load_s: float = 0.0
    data_bytes: int = 0
    meeting_bytes: int = 0
    message_bytes: int = 0
    device: DeviceMemory | None = None
    to_host_s: float = 0.0
    to_device_s: float = 0.0

    @property
    def needs_bytes(self) -> int:
        """All that one function holds at its peak: on its host, if it has an accelerator."""
        if self.device is not None:
            return self.base_bytes + self.sync_buffer_bytes + self.message_bytes + self.data_bytes
        held = self.base_bytes + self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
        held += self.sync_buffer_bytes + self.constant_bytes + self.activation_bytes + self.workspace_bytes
        held += self.meeting_bytes
        return held + self.waste_bytes + self.data_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreExplanation:
    """The store of one kind of object: what it is, and what the plan would take with the default one instead.

    `default` is None where it is the default one, and for checkpoints, which are not a part of an iteration.
    """

    kind: str
    store: str
    what: str
    default: Alternative | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A plan explained. `objective` is in `unit`: dollars, time valued, or seconds; `second` the best other plan.

    Where the number of steps between meetings was left open, `rounds` are the best plans for some of them.
    """

    plan: Plan
    objective: float
    unit: str
    stages: tuple[StageExplanation, ...]
    bottleneck: str
    binding: tuple[str, ...]
    second: Alternative | None
    stores: tuple[StoreExplanation, ...] = ()
    rounds: tuple[RoundChoice, ...] = ()


def explain(
    plan: Plan,
    profile: ModelProfile,
    spec: PlatformSpec,
    training: TrainingSpec,
    *,
    pins: Pins = NO_PINS,
    layer_limit: int = PLANNED_LAYERS,
) -> Explanation:
    """Explain `plan`, which was made for these arguments. Raises PlanError when they do not belong together."""
    estimate = evaluate(plan, profile, spec)
    priced = replace(plan, estimate=estimate)
    wanted = meeting_every(training, plan.sync_every) if training.sync_every == AUTO else training
    whole = Problem(profile=profile, spec=spec, training=wanted, pins=pins, stores=plan.stores)
    find = partial(optimize, pins=pins, layer_limit=layer_limit)
    return Explanation(
        plan=priced,
        objective=whole.goal.of_plan(priced),
        unit="seconds" if whole.goal.counts_seconds else "dollars",
        stages=tuple(_stage(priced, i, whole) for i in range(len(plan.stages))),
        bottleneck=estimate.bottleneck,
        binding=_binding(priced, whole),
        second=_second(priced, whole, layer_limit),
        stores=tuple(_store(priced, kind, whole) for kind in KINDS),
        rounds=round_choices(profile, spec, training, find),
    )


def _store(plan: Plan, kind: str, problem: Problem) -> StoreExplanation:
    name = getattr(plan.stores, kind)
    default = None
    if name != DEFAULT and kind != "checkpoints":
        other = replace(plan, stores=replace(plan.stores, **{kind: DEFAULT}))
        other = replace(other, estimate=evaluate(other, problem.profile, problem.spec))
        default = _beside(plan, other, problem, f"{kind} in {DEFAULT}")
    return StoreExplanation(kind=kind, store=name, what=problem.spec.store(name).what, default=default)


def _stage(plan: Plan, number: int, problem: Problem) -> StageExplanation:
    assert plan.estimate is not None
    stage, estimate = plan.stages[number], plan.estimate.stages[number]
    layers = problem.profile.layers[stage.first : stage.stop]
    parameters = problem.profile.parameter_bytes(stage.first, stage.stop)
    meetings = round(plan.kept_for_meetings(plan.replicas) * parameters)
    optimizer = round(plan.values_per_parameter * parameters) - meetings
    constant = sum(layer.constant_bytes for layer in layers)
    workspace = max(layer.workspace_bytes for layer in layers)
    each, device = plan.micro_batches // plan.replicas, estimate.device
    here = estimate if device is None else device
    workspace = workspace if device is None else min(workspace, device.activation_bytes)
    kept = 2 * parameters + optimizer + meetings + constant
    return StageExplanation(
        layers=stage.layers or tuple(name for layer in layers for name in layer.graph_layers),
        size=stage.size,
        memory_mb=stage.memory_mb,
        recompute=stage.recompute,
        base_bytes=estimate.base_bytes,
        parameter_bytes=parameters,
        gradient_bytes=parameters,
        optimizer_bytes=optimizer,
        sync_buffer_bytes=estimate.state_bytes - (kept if device is None else 0),
        constant_bytes=constant,
        activation_bytes=here.activation_bytes - workspace,
        workspace_bytes=workspace,
        waste_bytes=here.waste_bytes,
        message_bytes=0 if device is None else estimate.activation_bytes,
        device=device,
        compute_s=each * (estimate.forward_s + estimate.backward_s),
        upload_s=each * (estimate.forward_upload_s + estimate.backward_upload_s),
        download_s=each * (estimate.forward_download_s + estimate.backward_download_s),
        sync_s=estimate.sync_s,
        smaller=_smaller(plan, number, problem),
        load_s=each * estimate.load_s,
        data_bytes=estimate.data_bytes,
        meeting_bytes=meetings,
        to_host_s=each * (estimate.forward_to_host_s + estimate.backward_to_host_s),
        to_device_s=each * (estimate.forward_to_device_s + estimate.backward_to_device_s),
    )


def _smaller(plan: Plan, number: int, problem: Problem) -> Smaller | None:
    """The stage on the next smaller size of the platform."""
    sizes = [size for size in problem.spec.sizes if size.memory_mb < plan.stages[number].memory_mb]
    if not sizes:
        return None
    stage = replace(plan.stages[number], size=sizes[-1].name, memory_mb=sizes[-1].memory_mb)
    other = replace(plan, stages=(*plan.stages[:number], stage, *plan.stages[number + 1 :]))
    estimate = evaluate(other, problem.profile, problem.spec)
    lacks_mb = estimate.stages[number].lacks_bytes(sizes[-1].memory_mb) / MB
    if lacks_mb:
        return Smaller(size=sizes[-1].name, lacks_mb=lacks_mb, change=None)
    change = _beside(plan, replace(other, estimate=estimate), problem, f"stage {number} on {sizes[-1].name}")
    return Smaller(size=sizes[-1].name, lacks_mb=0.0, change=change)


def _beside(plan: Plan, other: Plan, problem: Problem, what: str) -> Alternative:
    assert plan.estimate is not None
    assert other.estimate is not None
    return Alternative(
        what=what,
        more_s=other.estimate.iteration_s - plan.estimate.iteration_s,
        more_usd=other.estimate.cost_usd - plan.estimate.cost_usd,
        worse_by=problem.goal.of_plan(other) - problem.goal.of_plan(plan),
    )


def _second(plan: Plan, whole: Problem, layer_limit: int) -> Alternative | None:
    """The best plan that is not this one, among the cuts that merging leaves."""
    problem, starts = merged_problem(
        whole.profile, whole.spec, whole.training, pins=whole.pins, layer_limit=layer_limit, stores=plan.stores
    )
    place = {start: number for number, start in enumerate(starts)}
    if any(stage.first not in place or stage.stop not in place for stage in plan.stages):
        return None  # its cuts are not among those that merging leaves
    stages = tuple(replace(stage, first=place[stage.first], stop=place[stage.stop]) for stage in plan.stages)
    other = second_best(problem, replace(plan, stages=stages))
    if other is None:
        return None
    moved = unmerged(other, starts)
    shape = " | ".join(f"layers {s.first}-{s.stop - 1} on {s.size}" for s in moved.stages)
    return _beside(
        plan,
        moved,
        whole,
        f"{moved.replicas} × ({shape}), {moved.schedule.value}, synchronisation {moved.synchronisation}",
    )


def _binding(plan: Plan, problem: Problem) -> tuple[str, ...]:
    """The limits that the plan uses (nearly) in full."""
    estimate, goal, found = plan.estimate, problem.goal, []
    assert estimate is not None
    for i, stage in enumerate(plan.stages):
        smaller = _smaller(plan, i, problem)
        if smaller is not None and smaller.change is None:
            found.append(f"memory of stage {i}: {smaller.lacks_mb:.0f} MB too much for {smaller.size}")
        elif estimate.stages[i].memory_bytes > _NEAR * stage.memory_mb * MB:
            found.append(f"memory of stage {i}: full to {estimate.stages[i].memory_bytes / MB / stage.memory_mb:.0%}")
        device = estimate.stages[i].device
        if device is not None and device.needs_bytes > _NEAR * device.has_bytes:
            found.append(f"GPU of stage {i}: full to {device.needs_bytes / device.has_bytes:.0%}")
    if estimate.iteration_s > _NEAR * goal.deadline_s:
        found.append(f"time: {estimate.iteration_s:.4g} s of {goal.deadline_s:.4g} s")
    if estimate.cost_usd > _NEAR * goal.budget_usd:
        found.append(f"budget: {estimate.cost_usd:.4g} $ of {goal.budget_usd:.4g} $")
    if plan.workers + plan.replicas > problem.max_functions:
        found.append(f"functions at once: {plan.workers} of {problem.max_functions}")
    if plan.replicas in (min(problem.degrees), max(problem.degrees)) and problem.training.replicas is not None:
        found.append(f"replicas: {plan.replicas} of {', '.join(map(str, problem.degrees))}")
    return (*found, *_request_limits(plan, problem.profile, problem.spec))


def _request_limits(plan: Plan, profile: ModelProfile, spec: PlatformSpec) -> Iterator[str]:
    """How much longer an iteration takes because requests wait; and the stores that the plan asks, in the mean of an
    iteration, for nearly as much a second as they take below all of its prefixes, or for more.
    """
    estimate, prefixes = plan.estimate, len(plan.stages) * min(plan.replicas, STAGE_PREFIXES)
    assert estimate is not None
    free_s = evaluate(plan, profile, spec.without_request_limits()).iteration_s
    if estimate.iteration_s > free_s:
        yield f"requests wait for their store: an iteration takes {estimate.iteration_s - free_s:.3g} s longer"
    for name in {item.store: None for item in estimate.stores}:
        items, store = [item for item in estimate.stores if item.store == name], spec.store(name)
        puts, gets = sum(item.puts for item in items), sum(item.gets for item in items)
        for what, count, each, share in (
            ("puts", puts, store.puts_s, prefixes),
            ("gets", gets, store.gets_s, prefixes),
            ("puts and gets", puts + gets, store.requests_s, 1),
        ):
            if each is not None and count > _NEAR * each * share * estimate.iteration_s:
                rate, where = count / estimate.iteration_s, f"below {share} prefixes" if share > 1 else "in all"
                yield f"requests: {rate:.0f} {what} a second of {each * share:.0f} {where} of {name}"
