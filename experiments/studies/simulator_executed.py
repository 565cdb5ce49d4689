"""Compares simulated with executed iterations of random plans whose tasks only occupy their lanes.

Tasks take about as long as those of the reference models in cloud functions, a tenth of a second and more, so that the
milliseconds by which a shared machine delays a thread hardly count. The plans are executed by turns, several times. The
ratio is that of the median of all steps of a plan; next to it is that of the fastest step, which other work on the
machine delays least. Then one plan of four stages and two replicas is drawn and written for Perfetto, both versions
together.
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from experiments.studies.synthetic import run
from funcpipe.core import Resource, ScheduleKind, Sync, TensorProfile, find_routes, write_side_by_side
from funcpipe.report.compare import typical_step
from funcpipe.report.gantt import draw
from funcpipe.scheduler.graph import StepShape, build_graph
from funcpipe.scheduler.simulator.costs import Cost
from funcpipe.scheduler.simulator.simulate import simulate
from funcpipe.scheduler.tasks import Kind, Task

STEPS = 2
BAR = 0.05


@dataclass(frozen=True)
class Stages:
    """How long the tasks of each stage take."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    link_bytes_s: tuple[float, ...]
    message_bytes: float
    gradient_bytes: float
    replicas: int
    latency_s: float = 0.04

    def cost(self, task: Task) -> Cost:
        match task.kind:
            case Kind.FORWARD:
                return Cost(self.forward_s[task.stage])
            case Kind.BACKWARD:
                return Cost(self.backward_s[task.stage])
            case kind if kind.resource is Resource.COMPUTE:
                return Cost(0.0)
            case Kind.PUT_ACTIVATION | Kind.GET_ACTIVATION | Kind.PUT_GRADIENT | Kind.GET_GRADIENT:
                return Cost(self.latency_s, self.message_bytes, self.link_bytes_s[task.stage])
            case Kind.PUT_NORM | Kind.GET_NORM:
                return Cost(self.latency_s, 8, self.link_bytes_s[task.stage])
            case _:
                return Cost(self.latency_s, self.gradient_bytes / self.replicas, self.link_bytes_s[task.stage])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("out/simulator"))
    options = parser.parse_args()
    shapes = [random_plan(random.Random(seed)) for seed in range(options.plans)]
    durations_s: list[list[float]] = [[] for _ in shapes]
    for _ in range(options.rounds):
        for found, (shape, stages) in zip(durations_s, shapes, strict=True):
            found += execute(shape, stages)
    print(f"{'stages':>6} {'replicas':>8} {'micro':>5} {'skips':>5} {'schedule':>11} {'sync':>12} {'tasks':>5}", end="")
    print(f" {'simulated s':>11} {'executed s':>10} {'ratio':>6} {'fastest':>7}")
    ratios = [show_row(shape, stages, found) for found, (shape, stages) in zip(durations_s, shapes, strict=True)]
    off = max(abs(ratio - 1) for ratio in ratios)
    print(f"largest difference {off:.1%} of {len(ratios)} plans (bar {BAR:.0%})")
    options.output.mkdir(parents=True, exist_ok=True)
    show(options.output)


def execute(shape: StepShape, stages: Stages) -> list[float]:
    """Seconds of each step."""
    executed = run(build_graph(shape), stages.cost, steps=STEPS)
    return [executed.of_step(step).duration_s for step in executed.steps()]


def show_row(shape: StepShape, stages: Stages, durations_s: Sequence[float]) -> float:
    """Print the results of a plan; ratios are executed divided by simulated seconds."""
    graph = build_graph(shape)
    simulated_s, executed_s = simulate(graph, stages.cost).duration_s, median(durations_s)
    skips = sum(
        len(route.consumers) > 1 or route.consumers[0] > route.producer + 1 for route in shape.routes.activations
    )
    print(f"{shape.stages:6} {shape.replicas:8} {shape.micro_batches:5} {skips:5} {shape.schedule.value:>11}", end="")
    print(f" {shape.sync.value:>12} {len(graph.tasks):5} {simulated_s:11.4f} {executed_s:10.4f}", end="")
    print(f" {executed_s / simulated_s:6.3f} {min(durations_s) / simulated_s:7.3f}", flush=True)
    return executed_s / simulated_s


def random_plan(draw_from: random.Random) -> tuple[StepShape, Stages]:
    """Up to four stages and three replicas; a tensor skips a stage now and then."""
    stages, replicas = draw_from.randint(1, 4), draw_from.randint(1, 3)
    pairs = [(i, i + 1) for i in range(stages - 1)]
    pairs += [(i, i + 2) for i in range(stages - 2) if draw_from.random() < 0.4]
    shape = StepShape(
        stages=stages,
        replicas=replicas,
        micro_batches=replicas * draw_from.randint(1, 6),
        routes=find_routes(range(stages), [tensor(a, b) for a, b in pairs]),
        schedule=draw_from.choice(list(ScheduleKind)),
        sync=draw_from.choice(list(Sync)),
        norms=draw_from.random() < 0.3,
    )
    forward_s = tuple(draw_from.uniform(0.08, 0.24) for _ in range(stages))
    return shape, Stages(
        forward_s=forward_s,
        backward_s=tuple(2 * seconds for seconds in forward_s),
        link_bytes_s=tuple(draw_from.uniform(3e7, 7e7) for _ in range(stages)),
        message_bytes=draw_from.uniform(0, 12e6),
        gradient_bytes=draw_from.uniform(8e6, 4e7),
        replicas=replicas,
    )


def tensor(producer: int, consumer: int) -> TensorProfile:
    name = f"t{producer}.{consumer}"
    return TensorProfile(name=name, producer=producer, consumers=(consumer,), forward_bytes=1, backward_bytes=1)


def show(output: Path) -> None:
    """Four stages, two replicas, eight micro-batches each, eager 1F1B, pipelined synchronisation."""
    shape = StepShape(
        stages=4,
        replicas=2,
        micro_batches=16,
        routes=find_routes(range(4), [tensor(i, i + 1) for i in range(3)]),
        schedule=ScheduleKind.EAGER_ONE_F_ONE_B,
        sync=Sync.PIPELINED,
    )
    stages = Stages((0.2,) * 4, (0.4,) * 4, (7e7,) * 4, 6e6, 32e6, 2)
    graph = build_graph(shape)
    simulated = simulate(graph, stages.cost)
    executed = typical_step(run(graph, stages.cost, steps=STEPS))
    draw(simulated, executed, output / "simulated_executed.png")
    write_side_by_side(simulated, executed, output / "simulated_executed.json")
    print(f"4 stages x 2 replicas: simulated {simulated.duration_s:.4f} s, executed {executed.duration_s:.4f} s")
    print(f"written: {output / 'simulated_executed.png'}, {output / 'simulated_executed.json'}")


if __name__ == "__main__":
    main()
