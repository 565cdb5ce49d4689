"""What whole jobs were expected to cost, beside their bills, on local functions with limits and prices of AWS Lambda.

A network of the demo's kind is trained over 1 to 4 functions, for some steps and for many, in functions that live for
long or hand over, with checkpoints as they are due or after every second step.
"""

import argparse
import json
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from experiments.cuts import even_cuts
from funcpipe import FaultTolerance, FuncPipe, JobEstimate, Plan, PlatformSpec, RunResult, load_spec
from funcpipe.core import Pins

WIDTH, SAMPLES, BATCH, MICRO_BATCH = 768, 64, 32, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A job: how it is cut, how long it is, and how its functions live."""

    name: str
    stages: int
    replicas: int
    epochs: int
    lifetime_s: float = 900.0
    checkpoint_steps: int | None = None


SHAPES = (
    Shape(name="1 function, short", stages=1, replicas=1, epochs=4),
    Shape(name="2 x 1", stages=2, replicas=1, epochs=10),
    Shape(name="2 x 1, checkpoints", stages=2, replicas=1, epochs=10, checkpoint_steps=2),
    Shape(name="2 x 2", stages=2, replicas=2, epochs=6),
    Shape(name="2 x 1, hand-overs", stages=2, replicas=1, epochs=45, lifetime_s=30.0),
)


def model() -> nn.Module:
    torch.manual_seed(1)
    hidden = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(nn.Linear(64, WIDTH), nn.Tanh(), *hidden, nn.Linear(WIDTH, 10))


def data() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(2)
    return [(torch.randn(64, generator=draw), torch.tensor(i % 10)) for i in range(SAMPLES)]


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.001)


def spec_of(shape: Shape) -> PlatformSpec:
    """AWS Lambda, with shorter lives where functions are to hand over; cold starts of a second keep jobs short."""
    aws = load_spec("aws-lambda")
    sizes = tuple(replace(size, cold_start_s=1.0) for size in aws.sizes)
    return replace(aws, sizes=sizes, cold_start_s=1.0, lifetime_s=shape.lifetime_s)


def run(shape: Shape) -> dict[str, Any]:
    """Plan, estimate and train one job; what was expected, and what was billed."""
    spec = spec_of(shape)
    pipe = FuncPipe(model(), loss_fn=nn.functional.cross_entropy, optimizer=optimizer)
    profile = pipe.profile(
        (torch.zeros(MICRO_BATCH, 64),),
        sample_target=torch.zeros(MICRO_BATCH).long(),
        platform=spec,
        micro_batch=MICRO_BATCH,
    )
    cuts = even_cuts(profile, shape.stages) if shape.stages > 1 else ()
    plan = pipe.optimize(global_batch=BATCH, pins=Pins(cuts=cuts, replicas=(shape.replicas,)))
    faults = FaultTolerance(checkpoint_steps=shape.checkpoint_steps)
    expected = pipe.estimate(data, epochs=shape.epochs, platform=spec, faults=faults)
    began_s = time.monotonic()
    result = pipe.train(data, epochs=shape.epochs, like=spec, faults=faults, prices=spec, progress=False)
    took_s = time.monotonic() - began_s
    assert plan.estimate is not None
    as_fast = replace(plan, estimate=replace(plan.estimate, iteration_s=observed_step_s(result)))
    again = pipe.estimate(data, epochs=shape.epochs, platform=spec, faults=faults, plan=as_fast)
    named = {"name": shape.name, "line": expected.line(), "plan": plan_text(plan)}
    return {
        **named,
        **items(expected, result, spec, took_s),
        "functions $, steps as observed": (again.functions_usd, result.bill.compute_usd),
        "total $, steps as observed": (again.cost_usd, result.bill.cost_usd),
    }


def plan_text(plan: Plan) -> str:
    return f"{len(plan.stages)} x {plan.replicas} of {'/'.join(stage.size for stage in plan.stages)}"


def items(expected: JobEstimate, result: RunResult, spec: PlatformSpec, took_s: float) -> Mapping[str, Any]:
    """Pairs of what was expected and what was billed."""
    bill = result.bill
    client_usd = spec.store("default").counted_usd(bill.client)
    return {
        "functions started": (expected.start.count + expected.hand_overs.count, bill.functions),
        "seconds": (
            expected.seconds,
            max(r.ended_at_s for r in result.workers) - min(r.started_at_s for r in result.workers) + 1.0,
        ),
        "iteration s": (expected.training.seconds / expected.steps, observed_step_s(result)),
        "functions $": (expected.functions_usd, bill.compute_usd),
        "their requests $": (expected.requests_usd - expected.client.requests_usd, bill.request_usd - client_usd),
        "client's requests $": (expected.client.requests_usd, client_usd),
        "client's traffic $": (expected.traffic_usd, bill.traffic_usd),
        "total $": (expected.cost_usd, bill.cost_usd),
        "whole command s": (expected.seconds, took_s),
    }


def observed_step_s(result: RunResult) -> float:
    """Seconds from step to step, the median over the last steps, which traces hold: without hand-overs."""
    ends: dict[int, float] = {}
    for event in result.trace.events:
        ends[event.step] = max(ends.get(event.step, 0.0), event.end_s)
    return median(ends[step + 1] - ends[step] for step in ends if step + 1 in ends)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", type=int, nargs="*", help="numbers of the shapes to train; all by default")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    found = []
    for number, shape in enumerate(SHAPES):
        if options.shapes and number not in options.shapes:
            continue
        figures = run(shape)
        found.append(figures)
        print(f"{figures['name']} ({figures['plan']}): {figures['line']}")
        print(f"  {'item':30} {'expected':>12} {'billed':>12} {'ratio':>6}")
        for name, value in figures.items():
            if isinstance(value, tuple):
                expected, billed = value
                print(
                    f"  {name:30} {expected:12.6g} {billed:12.6g} {expected / billed if billed else 0:6.2f}", flush=True
                )
    if options.output:
        options.output.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
