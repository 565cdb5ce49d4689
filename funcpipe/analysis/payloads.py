"""The bytes that tasks of a plan move, from its profile."""

from collections.abc import Callable

from funcpipe.comm.collectives import pattern_of
from funcpipe.comm.sum_pattern import Pattern
from funcpipe.core import ModelProfile, Plan, Routes, find_routes, stages_of_layers
from funcpipe.errors import InvalidValue
from funcpipe.scheduler.tasks import Kind, Task

_NORM_BYTES = 8


def routes_of(plan: Plan, profile: ModelProfile) -> Routes:
    """Return which tensors the stages of `plan` send each other."""
    stage_of_layer = stages_of_layers((stage.first, stage.stop) for stage in plan.stages)
    return find_routes(stage_of_layer, profile.tensors, profile.ties)


def payloads(plan: Plan, profile: ModelProfile) -> Callable[[Task], float]:
    """Return what gives the bytes that a task puts, gets, or copies between host and accelerator."""
    routes = routes_of(plan, profile)
    activations = {(route.producer, part): route.payload_bytes for part, route in routes.numbered_activations()}
    gradients = {(route.consumer, route.producer): route.payload_bytes for route in routes.gradients}
    ratios = dict.fromkeys((Kind.PUT_ACTIVATION, Kind.GET_ACTIVATION), plan.wire.ratio)
    ratios |= dict.fromkeys((Kind.PUT_GRADIENT, Kind.GET_GRADIENT), plan.gradient_wire.ratio)
    fragments = plan.sync_fragments if plan.trains_locally else 1
    summed = [profile.summed_bytes(stage.first, stage.stop) / fragments for stage in plan.stages]
    patterns = [pattern_of(plan, stage) for stage in range(len(plan.stages))]

    def payload(task: Task) -> float:
        match task.kind, task.peer, task.part:
            case Kind.PUT_ACTIVATION | Kind.ACTIVATION_TO_HOST, None, int(part):
                return ratios.get(task.kind, 1.0) * activations[task.stage, part]
            case Kind.GET_ACTIVATION | Kind.ACTIVATION_TO_DEVICE, int(peer), int(part):
                return ratios.get(task.kind, 1.0) * activations[peer, part]
            case Kind.PUT_GRADIENT | Kind.GRADIENT_TO_HOST, int(peer), None:
                return ratios.get(task.kind, 1.0) * gradients[task.stage, peer]
            case Kind.GET_GRADIENT | Kind.GRADIENT_TO_DEVICE, int(peer), None:
                return ratios.get(task.kind, 1.0) * gradients[peer, task.stage]
            case Kind.PUT_TIED | Kind.GET_TIED | Kind.PUT_TIED_SUM | Kind.GET_TIED_SUM, _, int(part):
                return routes.ties[part % len(routes.ties)].payload_bytes
            case Kind.PUT_OUTPUTS | Kind.GET_OUTPUTS, _, None:
                return plan.micro_batches // plan.replicas * profile.joint_bytes
            case Kind.PUT_NORM | Kind.GET_NORM, _, None:
                return _NORM_BYTES
            case _:
                raw = task.kind in (Kind.PUT_SPLIT, Kind.GET_SPLIT)
                ratio = (plan.wire_sync if raw else plan.merged_wire).ratio
                return ratio * summed[task.stage] * _share(task, patterns[task.stage])

    return payload


def _share(task: Task, chosen: Pattern) -> float:
    """The share of the gradient that a transfer of a synchronisation moves."""
    match task.kind, task.part:
        case Kind.PUT_SPLIT, int(part):
            return chosen.raw_share(task.replica, part)
        case Kind.GET_SPLIT, int(part):
            return chosen.read_share(part)
        case Kind.PUT_MERGED | Kind.GET_MERGED, int(part):
            return chosen.merged_share(part)
        case _:
            raise InvalidValue("task", str(task), "must move bytes")
