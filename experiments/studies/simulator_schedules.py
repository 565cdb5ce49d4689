"""Simulates how long each schedule takes and what it holds as transfers grow from nothing to as long as computation.

The stages of a chain are equal: forwards take one second, backwards two; each upload and each download takes the given
share of the computation that it follows. `held` is the most micro-batches that any stage has in flight.
"""

import argparse

from funcpipe.core import ScheduleKind, Sync, TensorProfile, find_routes
from funcpipe.scheduler.graph import StepShape, build_graph
from funcpipe.scheduler.schedules import in_flight
from funcpipe.scheduler.simulator.costs import Cost, costs_of
from funcpipe.scheduler.simulator.simulate import play
from funcpipe.scheduler.tasks import Kind, Task

FORWARD_S, BACKWARD_S = 1.0, 2.0
SHARES = (0.0, 0.1, 0.25, 0.5, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=32)
    options = parser.parse_args()
    stages, micro_batches = options.stages, options.micro_batches
    print(f"{stages} stages, {micro_batches} micro-batches: seconds of an iteration, and beside GPipe")
    print(f"{'each transfer':12} {'held':>5}" + "".join(f"{share:>16.0%}" for share in SHARES))
    gpipe = [iteration_s(ScheduleKind.GPIPE, stages, micro_batches, share) for share in SHARES]
    for schedule in ScheduleKind:
        held = max(in_flight(schedule, stage=s, stages=stages, micro_batches=micro_batches) for s in range(stages))
        found = [iteration_s(schedule, stages, micro_batches, share) for share in SHARES]
        columns = (f"{seconds:8.1f} ({seconds / base:4.2f})" for seconds, base in zip(found, gpipe, strict=True))
        print(f"{schedule.value:12} {held:5}" + "".join(f"{column:>16}" for column in columns))


def iteration_s(schedule: ScheduleKind, stages: int, micro_batches: int, share: float) -> float:
    tensors = [
        TensorProfile(name=f"t{i}", producer=i, consumers=(i + 1,), forward_bytes=1, backward_bytes=1)
        for i in range(stages - 1)
    ]
    shape = StepShape(
        stages=stages,
        replicas=1,
        micro_batches=micro_batches,
        routes=find_routes(range(stages), tensors),
        schedule=schedule,
        sync=Sync.PIPELINED,
    )
    graph = build_graph(shape)
    return play(graph, costs_of(graph, lambda task: cost(task, share), alike=True)).duration_s


def cost(task: Task, share: float) -> Cost:
    match task.kind:
        case Kind.FORWARD:
            return Cost(FORWARD_S)
        case Kind.BACKWARD:
            return Cost(BACKWARD_S)
        case Kind.PUT_ACTIVATION | Kind.GET_ACTIVATION:
            return Cost(share * FORWARD_S)
        case Kind.PUT_GRADIENT | Kind.GET_GRADIENT:
            return Cost(share * BACKWARD_S)
        case _:
            return Cost(0.0)


if __name__ == "__main__":
    main()
