"""A task graph on a virtual clock."""

from collections.abc import Callable

from funcpipe.core import Trace
from funcpipe.errors import PlanError
from funcpipe.scheduler.graph import Graph
from funcpipe.scheduler.simulator.compiled_graph import CompiledGraph, compile_graph
from funcpipe.scheduler.simulator.costs import Cost, Costs, costs_of
from funcpipe.scheduler.simulator.disturbances import Disturbances, cold_starts, disturbed
from funcpipe.scheduler.simulator.independent import Turns
from funcpipe.scheduler.simulator.shared import Coupled
from funcpipe.scheduler.simulator.timeline import Timeline
from funcpipe.scheduler.tasks import RESOURCES, Task

UNDISTURBED = Disturbances()


def simulate(
    graph: Graph,
    cost: Callable[[Task], Cost],
    *,
    disturbances: Disturbances = UNDISTURBED,
    run: str = "simulation",
    step: int = 0,
) -> Trace:
    """Play `graph`, in which each task takes what `cost` says, and trace it; raises as `play` does."""
    return play(graph, costs_of(graph, cost), disturbances=disturbances).trace(run=run, step=step)


def play(graph: Graph, costs: Costs, *, disturbances: Disturbances = UNDISTURBED) -> Timeline:
    """Let each task start when all it needs has ended and its lane has ended the task before.

    Downloads do not wait for those before them on their lane whose objects are not there yet, and transfers of a
    synchronisation wait for their latency side by side: of those that could move, the first in the graph does.

    Raises PlanError when tasks wait for each other, InvalidValue when `disturbances` name workers that there are not.
    """
    wiring = compile_graph(graph)
    disturbances.check_workers(wiring.workers)
    costs = disturbed(costs, graph, disturbances)
    starting_s = cold_starts(len(wiring.workers), disturbances).tolist()
    if not disturbances.independent:
        coupled = Coupled(wiring, costs, disturbances, [RESOURCES[task.kind] for task in graph.tasks])
        coupled.play(starting_s)
        starts_s, ends_s, lost = coupled.starts_s, coupled.ends_s, tuple(coupled.lost)
        attempts = [coupled.deaths[worker] for worker in wiring.worker_of]
    else:
        starts_s, ends_s = Turns(wiring, costs).play(starting_s)
        attempts, lost = [0] * wiring.tasks, ()
    _all_ended(graph, wiring, ends_s)
    last = wiring.tasks
    return Timeline(
        graph=graph, costs=costs, starts_s=starts_s[:last], ends_s=ends_s[:last], attempts=attempts[:last], lost=lost
    )


def _all_ended(graph: Graph, wiring: CompiledGraph, ends_s: list[float]) -> None:
    ended = [end_s >= 0 for end_s in ends_s[: wiring.tasks]]
    if all(ended):
        return
    heads = (next((i for i in positions if not ended[i]), None) for positions in graph.lanes().values())
    stuck = [str(graph.tasks[position]) for position in heads if position is not None]
    raise PlanError(f"the task graph cannot end; at the heads of its lanes wait {', '.join(stuck)}")
