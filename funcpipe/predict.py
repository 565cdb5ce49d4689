"""A plan on a virtual clock: what each task takes by the cost model, played by the simulator."""

from collections.abc import Callable

from funcpipe.comm.scatter_reduce import pattern
from funcpipe.core import ModelProfile, Plan, PlatformSpec, Routes, Trace, find_routes
from funcpipe.errors import InvalidValue
from funcpipe.partitioner.cost import evaluate, plan_loads, plan_setting
from funcpipe.partitioner.formulas import shared_link
from funcpipe.scheduler.graph import StepShape, build_graph
from funcpipe.scheduler.simulate import Cost, simulate
from funcpipe.scheduler.tasks import Kind, Task


def predict(plan: Plan, profile: ModelProfile, spec: PlatformSpec) -> Trace:
    """One iteration of `plan`, task by task; PlanError unless plan, profile and platform belong together."""
    stage_of_layer = [i for i, stage in enumerate(plan.stages) for _ in range(stage.first, stage.stop)]
    cost = task_cost(plan, profile, spec)
    routes = find_routes(stage_of_layer, profile.tensors, profile.ties)
    shape = StepShape(
        stages=len(plan.stages),
        replicas=plan.replicas,
        micro_batches=plan.micro_batches,
        routes=routes,
        schedule=plan.schedule,
        sync=plan.sync,
        streams=plan.streams,
    )
    return simulate(build_graph(shape), cost, shared_cores=spec.shared_cores, run=f"prediction of {plan.model}")


def task_cost(plan: Plan, profile: ModelProfile, spec: PlatformSpec) -> Callable[[Task], Cost]:
    """What any task of `plan` takes. Summing, copying and updating are free, as in the cost model."""
    stages = evaluate(plan, profile, spec).stages
    loads = plan_loads(plan, profile, spec)
    up, down = shared_link(loads, plan_setting(plan, profile, spec), plan.workers)
    payload = _payloads(plan, profile)

    def cost(task: Task) -> Cost:
        if task.kind is Kind.FORWARD:
            return Cost(stages[task.stage].forward_s)
        if task.kind is Kind.BACKWARD:
            return Cost(stages[task.stage].backward_s)
        if not (task.kind.is_put or task.kind.is_get):
            return Cost(0.0)
        size = payload(task)
        link_bytes_s = float((up if task.kind.is_put else down)[task.stage])
        return Cost(spec.latency_s + size / link_bytes_s, round(size))

    return cost


def _payloads(plan: Plan, profile: ModelProfile) -> Callable[[Task], float]:
    """The bytes that a put or get moves."""
    stage_of_layer = [i for i, stage in enumerate(plan.stages) for _ in range(stage.first, stage.stop)]
    routes = find_routes(stage_of_layer, profile.tensors, profile.ties)
    activations = _by_part(routes)
    gradients = {(route.consumer, route.producer): route.payload_bytes for route in routes.gradients}
    summed = [profile.summed_bytes(stage.first, stage.stop) for stage in plan.stages]

    chosen = pattern(plan.sync, plan.replicas, plan.streams)

    def payload(task: Task) -> float:
        match task.kind, task.peer, task.part:
            case Kind.PUT_ACTIVATION, None, int(part):
                return plan.wire.ratio * activations[task.stage, part]
            case Kind.GET_ACTIVATION, int(peer), int(part):
                return plan.wire.ratio * activations[peer, part]
            case Kind.PUT_GRADIENT, int(peer), None:
                return plan.wire.ratio * gradients[task.stage, peer]
            case Kind.GET_GRADIENT, int(peer), None:
                return plan.wire.ratio * gradients[peer, task.stage]
            case Kind.PUT_TIED | Kind.GET_TIED | Kind.PUT_TIED_SUM | Kind.GET_TIED_SUM, _, int(part):
                return routes.ties[part].payload_bytes
            case Kind.PUT_SPLIT, None, int(part):
                return summed[task.stage] * chosen.raw_share(task.replica, part)
            case Kind.GET_SPLIT, int(), int():
                return summed[task.stage] * chosen.piece_share
            case Kind.PUT_MERGED | Kind.GET_MERGED, _, int(part):
                return summed[task.stage] * chosen.merged_share(part)
            case _:
                raise InvalidValue("task", str(task), "must move bytes")

    return payload


def _by_part(routes: Routes) -> dict[tuple[int, int], int]:
    """Bytes of each activation object by (producer stage, part), numbered as in the task graph."""
    found: dict[tuple[int, int], int] = {}
    for route in routes.activations:
        part = sum(1 for stage, _ in found if stage == route.producer)
        found[route.producer, part] = route.payload_bytes
    return found
