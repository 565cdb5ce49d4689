"""Compares simulated iterations of random plans with the closed form of the cost model; differences by cause.

The closed form is exact for a chain under GPipe with one replica whose computation transfers do not slow: there both
must agree to 1e-9. Every other row changes one thing.
"""

import argparse
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median

from funcpipe.core import LayerProfile, ModelProfile, Plan, PlatformSpec, ScheduleKind, Stage, Sync, TensorProfile, Wire
from funcpipe.partitioner.cost.evaluate import evaluate
from funcpipe.platforms.catalog import load_spec
from funcpipe.report.predict import forecast

Case = tuple[Plan, ModelProfile, PlatformSpec]
MICRO_BATCH = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=200)
    options = parser.parse_args()
    print(f"{'simulated / closed form - 1':44} {'smallest':>12} {'median':>12} {'largest':>12}")
    for name, change in CAUSES.items():
        found = sorted(differences(change, options.plans))
        print(f"{name:44} {found[0]:12.2e} {median(found):12.2e} {found[-1]:12.2e}")
        if change is unchanged and max(map(abs, found)) > 1e-9:
            raise SystemExit("the simulator departs from the closed form where that is exact")


def differences(change: Callable[[Case, random.Random], Case], count: int) -> Iterator[float]:
    for seed in range(count):
        draw = random.Random(seed)
        plan, profile, spec = change(chain(draw), draw)
        yield forecast(plan, profile, spec).duration_s / evaluate(plan, profile, spec).iteration_s - 1


def chain(draw: random.Random) -> Case:
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


if __name__ == "__main__":
    main()
