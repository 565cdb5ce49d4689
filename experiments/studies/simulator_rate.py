"""How many tasks a second the simulator plays, on one core: a step of 64 stages, 16 replicas and 64 micro-batches each.

Three rates: making the graph, playing it under different disturbances, and writing out the events for a trace.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from funcpipe.core import Resource, ScheduleKind, Sync, TensorProfile, find_routes
from funcpipe.scheduler.graph import StepShape, build_graph
from funcpipe.scheduler.simulator.costs import Cost, costs_of
from funcpipe.scheduler.simulator.disturbances import Disturbances, Failure
from funcpipe.scheduler.simulator.simulate import play
from funcpipe.scheduler.tasks import Task

T = TypeVar("T")
LINK_BYTES_S, BODY_BYTES, LATENCY_S = 70e6, 2_000_000, 0.04
DISTURBANCES = {
    "nothing shared": Disturbances(),
    "noise, cold starts, a straggler": Disturbances(
        compute_jitter=0.1, transfer_jitter=0.3, cold_start_s=2.5, cold_start_jitter=0.5, stragglers={(0, 0): 1.5}
    ),
    "contention": Disturbances(contention=1.2),
    "a shared link": Disturbances(shared_bytes_s=2e9),
    "a death": Disturbances(failures=(Failure(worker=(0, 0), at_s=30.0, restart_s=2.5),)),
    "contention, shared link and cores": Disturbances(contention=1.2, shared_bytes_s=2e9, shared_cores=512),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=64)
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument("--micro-batches", type=int, default=64, help="of each replica")
    options = parser.parse_args()
    shape = chain(options.stages, options.replicas, options.micro_batches * options.replicas)
    graph, graph_s = timed(lambda: build_graph(shape))
    costs, costs_s = timed(lambda: costs_of(graph, cost, alike=True))
    print(f"{options.stages} stages x {options.replicas} replicas x {options.micro_batches} micro-batches each")
    line("graph", len(graph.tasks), graph_s)
    line("costs", len(graph.tasks), costs_s)
    for name, disturbances in DISTURBANCES.items():
        timeline, play_s = timed(partial(play, graph, costs, disturbances=disturbances))
        line(f"play: {name}", len(graph.tasks), play_s, f"iteration {timeline.duration_s:.1f} s")
    trace, trace_s = timed(lambda: timeline.trace(run="rate"))
    line("trace", len(trace.events), trace_s)


def chain(stages: int, replicas: int, micro_batches: int) -> StepShape:
    """A chain of stages under 1F1B."""
    tensors = [
        TensorProfile(name=f"t{i}", producer=i, consumers=(i + 1,), forward_bytes=BODY_BYTES, backward_bytes=BODY_BYTES)
        for i in range(stages - 1)
    ]
    return StepShape(
        stages=stages,
        replicas=replicas,
        micro_batches=micro_batches,
        routes=find_routes(range(stages), tensors),
        schedule=ScheduleKind.ONE_F_ONE_B,
        sync=Sync.PIPELINED,
    )


def cost(task: Task) -> Cost:
    """Stages of different speeds, equal links."""
    if task.kind.resource is Resource.COMPUTE:
        return Cost(0.2 + 0.001 * (task.stage % 7))
    return Cost(LATENCY_S, BODY_BYTES, LINK_BYTES_S)


def timed(do: Callable[[], T]) -> tuple[T, float]:
    """What it returns, and the processor seconds that it takes."""
    start_s = time.process_time()
    result = do()
    return result, time.process_time() - start_s


def line(what: str, tasks: int, seconds: float, more: str = "") -> None:
    print(f"{what:40} {seconds:7.2f} s {tasks / seconds:10,.0f} tasks/s  {more}".rstrip())


if __name__ == "__main__":
    main()
