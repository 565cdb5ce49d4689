"""Plays a task graph on a virtual clock: the way into the simulator."""

from collections.abc import Callable

from funcpipe.core import Trace
from funcpipe.errors import PlanError
from funcpipe.scheduler.graph import Graph
from funcpipe.scheduler.simulator.compiled_graph import CompiledGraph, compile_graph
from funcpipe.scheduler.simulator.costs import Cost, Costs, costs_of
from funcpipe.scheduler.simulator.disturbances import UNDISTURBED, Disturbances, cold_starts, disturbed
from funcpipe.scheduler.simulator.independent import IndependentSimulator
from funcpipe.scheduler.simulator.shared import SharedSimulator
from funcpipe.scheduler.simulator.timeline import Timeline
from funcpipe.scheduler.tasks import RESOURCES, Task


def simulate(
    graph: Graph,
    cost: Callable[[Task], Cost],
    *,
    disturbances: Disturbances = UNDISTURBED,
    run: str = "simulation",
    step: int = 0,
) -> Trace:
    """Play `graph`, each task of which costs what `cost` says, and return its trace; raises what `play` raises."""
    return play(graph, costs_of(graph, cost), disturbances=disturbances).trace(run=run, step=step)


def play(graph: Graph, costs: Costs, *, disturbances: Disturbances = UNDISTURBED) -> Timeline:
    """Start each task as soon as `lane_rules` let it, and return when all of them started and ended.

    Raises PlanError if tasks wait for each other, InvalidValue if `disturbances` names workers that do not exist.
    """
    compiled = compile_graph(graph)
    disturbances.check_workers(compiled.workers)
    costs = disturbed(costs, graph, disturbances)
    starting_s = cold_starts(len(compiled.workers), disturbances).tolist()
    if not disturbances.independent:
        shared = SharedSimulator(compiled, costs, disturbances, [RESOURCES[task.kind] for task in graph.tasks])
        shared.play(starting_s)
        starts_s, ends_s, lost = shared.starts_s, shared.ends_s, tuple(shared.lost)
        attempts = [shared.deaths[worker] for worker in compiled.worker_of]
    else:
        starts_s, ends_s = IndependentSimulator(compiled, costs).play(starting_s)
        attempts, lost = [0] * compiled.tasks, ()
    _all_ended(graph, compiled, ends_s)
    last = compiled.tasks
    return Timeline(
        graph=graph, costs=costs, starts_s=starts_s[:last], ends_s=ends_s[:last], attempts=attempts[:last], lost=lost
    )


def _all_ended(graph: Graph, compiled: CompiledGraph, ends_s: list[float]) -> None:
    ended = [end_s >= 0 for end_s in ends_s[: compiled.tasks]]
    if all(ended):
        return
    heads = (next((i for i in positions if not ended[i]), None) for positions in graph.lanes().values())
    stuck = [str(graph.tasks[position]) for position in heads if position is not None]
    raise PlanError(f"the task graph cannot end; at the heads of its lanes wait {', '.join(stuck)}")
