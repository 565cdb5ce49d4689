"""What the simulator says and how fast it is: beside the closed form, of each schedule, in tasks a second.

`closed-form` compares iterations of random plans with the cost model's closed form, and tells differences by cause. The
closed form is exact for a chain under GPipe with one replica whose computation transfers do not slow: there both must
agree to 1e-9. Every other row changes one thing.
`schedules` simulates each schedule as transfers grow from nothing to as long as computation. Stages are equal: forwards
take one second, backwards two, each transfer the given share of the computation that it follows. `held` is the most
micro-batches that any stage has in flight.
`rate` tells how many tasks a second are made, played under different disturbances, and written out, on one core.
"""

import argparse
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from statistics import median
from typing import TypeVar

from funcpipe.core import (
    LayerProfile,
    ModelProfile,
    Plan,
    PlatformSpec,
    Resource,
    ScheduleKind,
    Stage,
    Sync,
    TensorProfile,
    Wire,
    find_routes,
)
from funcpipe.partitioner.cost.evaluate import evaluate
from funcpipe.platforms.catalog import load_spec
from funcpipe.report.predict import forecast
from funcpipe.scheduler.graph import StepShape, build_graph
from funcpipe.scheduler.schedules import in_flight
from funcpipe.scheduler.simulator.costs import Cost, costs_of
from funcpipe.scheduler.simulator.disturbances import Disturbances, Failure
from funcpipe.scheduler.simulator.simulate import play
from funcpipe.scheduler.tasks import Kind, Task

Case = tuple[Plan, ModelProfile, PlatformSpec]
MICRO_BATCH = 4
FORWARD_S, BACKWARD_S = 1.0, 2.0
SHARES = (0.0, 0.1, 0.25, 0.5, 1.0)
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    compared = verbs.add_parser("closed-form")
    compared.add_argument("--plans", type=int, default=200)
    compared.set_defaults(do=closed_form)
    scheduled = verbs.add_parser("schedules")
    scheduled.add_argument("--stages", type=int, default=8)
    scheduled.add_argument("--micro-batches", type=int, default=32)
    scheduled.set_defaults(do=schedules)
    rated = verbs.add_parser("rate")
    rated.add_argument("--stages", type=int, default=64)
    rated.add_argument("--replicas", type=int, default=16)
    rated.add_argument("--micro-batches", type=int, default=64, help="of each replica")
    rated.set_defaults(do=rate)
    options = parser.parse_args()
    options.do(options)


def chain(schedule: ScheduleKind, stages: int, micro_batches: int, *, replicas: int = 1) -> StepShape:
    """A chain of stages."""
    tensors = [
        TensorProfile(name=f"t{i}", producer=i, consumers=(i + 1,), forward_bytes=BODY_BYTES, backward_bytes=BODY_BYTES)
        for i in range(stages - 1)
    ]
    return StepShape(
        stages=stages,
        replicas=replicas,
        micro_batches=micro_batches,
        routes=find_routes(range(stages), tensors),
        schedule=schedule,
        sync=Sync.PIPELINED,
    )


def closed_form(options: argparse.Namespace) -> None:
    """Simulated iterations beside the closed form, by cause."""
    print(f"{'simulated / closed form - 1':44} {'smallest':>12} {'median':>12} {'largest':>12}")
    for name, change in CAUSES.items():
        found = sorted(differences(change, options.plans))
        print(f"{name:44} {found[0]:12.2e} {median(found):12.2e} {found[-1]:12.2e}")
        if change is unchanged and max(map(abs, found)) > 1e-9:
            raise SystemExit("the simulator departs from the closed form where that is exact")


def differences(change: Callable[[Case, random.Random], Case], count: int) -> Iterator[float]:
    for seed in range(count):
        draw = random.Random(seed)
        plan, profile, spec = change(random_chain(draw), draw)
        yield forecast(plan, profile, spec).duration_s / evaluate(plan, profile, spec).iteration_s - 1


def random_chain(draw: random.Random) -> Case:
    """A random plan for a random chain, without replicas, on AWS Lambda without contention."""
    spec = replace(load_spec("aws-lambda"), contention=1.0)
    count = draw.randint(2, 24)
    layers = []
    for i in range(count):
        forward_s = [draw.uniform(0.01, 0.6) for _ in spec.sizes]
        layers.append(
            LayerProfile(
                name=f"layer{i}",
                parameter_bytes=draw.randint(10**5, 10**8),
                activation_bytes=10**6,
                forward_s=tuple(forward_s),
                backward_s=tuple(draw.uniform(1.5, 2.5) * seconds for seconds in forward_s),
            )
        )
    tensors = [tensor(i, (i + 1,), draw) for i in range(count - 1)]
    profile = ModelProfile(
        model="chain",
        micro_batch=MICRO_BATCH,
        platform=spec.name,
        sizes=tuple(size.name for size in spec.sizes),
        base_memory_bytes=0,
        layers=tuple(layers),
        tensors=tuple(tensors),
    )
    cuts = [0, *sorted(draw.sample(range(1, count), draw.randint(1, min(7, count - 1)))), count]
    sizes = [draw.choice(spec.sizes) for _ in cuts[1:]]
    stages = tuple(
        Stage(first=a, stop=b, size=size.name, memory_mb=size.memory_mb)
        for a, b, size in zip(cuts, cuts[1:], sizes, strict=False)
    )
    plan = Plan(
        global_batch=MICRO_BATCH * draw.randint(1, 16),
        micro_batch=MICRO_BATCH,
        replicas=1,
        schedule=ScheduleKind.GPIPE,
        sync=Sync.PIPELINED,
        wire=draw.choice([Wire.FP32, Wire.BF16]),
        stages=stages,
    )
    return plan, profile, spec


def tensor(producer: int, consumers: tuple[int, ...], draw: random.Random) -> TensorProfile:
    size = draw.randint(10**5, 4 * 10**7)
    name = f"t{producer}" + "".join(f".{consumer}" for consumer in consumers)
    return TensorProfile(name=name, producer=producer, consumers=consumers, forward_bytes=size, backward_bytes=size)


def unchanged(case: Case, _: random.Random) -> Case:
    return case


def skips(case: Case, draw: random.Random) -> Case:
    """A third more tensors, which skip layers."""
    plan, profile, spec = case
    count = len(profile.layers)
    pairs = [sorted(draw.sample(range(count), 2)) for _ in range(count // 3)]
    more = tuple(tensor(a, (b,), draw) for a, b in {(a, b) for a, b in pairs if b > a + 1})
    return plan, replace(profile, tensors=profile.tensors + more), spec


def contention(case: Case, _: random.Random) -> Case:
    """The closed form slows all computation, the simulator that during which bytes move."""
    plan, profile, spec = case
    return plan, profile, replace(spec, contention=1.2)


def shared_link(case: Case, _: random.Random) -> Case:
    """The closed form gives every function its share of the cap always, the simulator those that transfer."""
    plan, profile, spec = case
    return plan, profile, replace(spec, shared_bytes_s=1.5e8)


def half_precision(case: Case, _: random.Random) -> Case:
    """Losses are scaled, so all stages exchange norms before they update."""
    plan, profile, spec = case
    return replace(plan, wire=Wire.FP16), profile, spec


def replicas(sync: Sync) -> Callable[[Case, random.Random], Case]:
    """Two to eight replicas, whose gradients are summed."""

    def change(case: Case, draw: random.Random) -> Case:
        plan, profile, spec = case
        count = draw.randint(2, 8)
        return replace(plan, replicas=count, global_batch=plan.global_batch * count, sync=sync), profile, spec

    return change


def schedule(kind: ScheduleKind) -> Callable[[Case, random.Random], Case]:
    """Another schedule; its closed form assumes that all stages are equally fast."""

    def change(case: Case, _: random.Random) -> Case:
        plan, profile, spec = case
        return replace(plan, schedule=kind), profile, spec

    return change


CAUSES: dict[str, Callable[[Case, random.Random], Case]] = {
    "none: chain, GPipe, one replica": unchanged,
    "tensors that skip stages": skips,
    "contention 1.2": contention,
    "shared link of 150 MB/s": shared_link,
    "fp16: norms exchanged": half_precision,
    "replicas, three-phase": replicas(Sync.THREE_PHASE),
    "replicas, pipelined": replicas(Sync.PIPELINED),
    "1F1B": schedule(ScheduleKind.ONE_F_ONE_B),
    "eager 1F1B": schedule(ScheduleKind.EAGER_ONE_F_ONE_B),
}


def schedules(options: argparse.Namespace) -> None:
    """Seconds and micro-batches held of each schedule."""
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
    graph = build_graph(chain(schedule, stages, micro_batches))
    return play(graph, costs_of(graph, lambda task: share_cost(task, share), alike=True)).duration_s


def share_cost(task: Task, share: float) -> Cost:
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


def rate(options: argparse.Namespace) -> None:
    """Tasks that are played in a second."""
    shape = chain(
        ScheduleKind.ONE_F_ONE_B,
        options.stages,
        options.micro_batches * options.replicas,
        replicas=options.replicas,
    )
    graph, graph_s = timed(lambda: build_graph(shape))
    costs, costs_s = timed(lambda: costs_of(graph, rate_cost, alike=True))
    print(f"{options.stages} stages x {options.replicas} replicas x {options.micro_batches} micro-batches each")
    line("graph", len(graph.tasks), graph_s)
    line("costs", len(graph.tasks), costs_s)
    for name, disturbances in DISTURBANCES.items():
        timeline, play_s = timed(partial(play, graph, costs, disturbances=disturbances))
        line(f"play: {name}", len(graph.tasks), play_s, f"iteration {timeline.duration_s:.1f} s")
    trace, trace_s = timed(lambda: timeline.trace(run="rate"))
    line("trace", len(trace.events), trace_s)


def rate_cost(task: Task) -> Cost:
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
