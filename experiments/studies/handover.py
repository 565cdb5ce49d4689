"""Two hundred steps through many lives of each function: the same bits, and what a hand-over costs.

Two stages of two replicas run as local functions whose life is about two seconds, and once as functions that live for
ever. What the cost model charges for a hand-over is printed beside what it took: the pause of the worker, and how much
longer the run was. With steps as short as these, functions hand over in different ones, and each time all wait.
"""

import argparse
import json
import time
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe import FuncPipe
from funcpipe.client.results import RunResult
from funcpipe.core import Event, FaultTolerance, Outcome, Plan, ScheduleKind, Sync, Wire
from funcpipe.model.graph import trace
from funcpipe.partitioner.cost.evaluate import hand_over_time_s
from funcpipe.platforms.catalog import load_spec
from funcpipe.testing.plans import even_stages

SAMPLES, EPOCHS, STEPS = 80, 20, 200
STEP_S = 0.1
WIDTH = 256


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))


def data() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(2)
    return [(torch.randn(16, generator=draw), torch.tensor(i % 4)) for i in range(SAMPLES)]


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def slow_loss(output: Tensor, target: Tensor) -> Tensor:
    """The cross entropy, after half a step."""
    time.sleep(STEP_S / 2)
    return nn.functional.cross_entropy(output, target)


def plan() -> Plan:
    names = [layer.name for layer in trace(model(), (torch.zeros(2, 16),)).layers]
    return Plan(
        global_batch=8,
        micro_batch=2,
        replicas=2,
        schedule=ScheduleKind.GPIPE,
        sync=Sync.PIPELINED,
        wire=Wire.FP32,
        platform="local",
        stages=even_stages(names, 2),
    )


def train(faults: FaultTolerance) -> RunResult:
    pipe = FuncPipe(model(), loss_fn=slow_loss, optimizer=optimizer)
    return pipe.train(data, epochs=EPOCHS, plan=plan(), faults=faults, message_deadline_s=60)


def seconds(result: RunResult) -> float:
    """From the first worker's start to the last one's end."""
    reports = result.workers
    return max(r.ended_at_s for r in reports) - min(r.started_at_s for r in reports)


def pauses_s(result: RunResult) -> list[float]:
    """How long each worker did nothing from the last task of a life to the first of its next."""
    lives: dict[tuple[int, int, int], list[Event]] = defaultdict(list)
    for event in result.trace.events:
        lives[event.stage, event.replica, event.attempt].append(event)
    return [
        min(e.start_s for e in following) - max(e.end_s for e in life)
        for (stage, replica, attempt), life in lives.items()
        if (following := lives.get((stage, replica, attempt + 1)))
    ]


def charged_s() -> float:
    """What the cost model takes for a hand-over: the slowest stage's state goes up and comes down again."""
    spec, state = load_spec("local"), dict(model().named_parameters())
    size = spec.sizes[0]
    largest = max(p.nbytes for p in state.values()) * 3  # the weight that decides, and two moments
    return hand_over_time_s(largest / size.upload_bytes_s + largest / size.download_bytes_s, spec.latency_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lifetime", type=float, default=1.2, metavar="S")
    parser.add_argument(
        "--cold-start", type=float, default=0.3, metavar="S", help="that functions allow their successors"
    )
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    undisturbed = train(FaultTolerance(heartbeat_s=1.0))
    short = train(FaultTolerance(heartbeat_s=1.0, lifetime_s=options.lifetime, cold_start_s=options.cold_start))
    same = all(torch.equal(tensor, short.state_dict()[name]) for name, tensor in undisturbed.state_dict().items())
    lives = Counter(report.worker for report in short.workers)
    handed = sum(report.outcome is Outcome.HANDED_OVER for report in short.workers)
    extra_s = (seconds(short) - seconds(undisturbed)) / handed
    figures: dict[str, Any] = {
        "steps": len(short.losses),
        "lives of each worker": dict(sorted(lives.items())),
        "same bits": same and short.losses == undisturbed.losses,
        "seconds, functions that live for ever": seconds(undisturbed),
        "seconds, short lives": seconds(short),
        "hand-overs": handed,
        "seconds more for each": extra_s,
        "median pause between two lives, seconds": median(pauses_s(short)),
        "charged for a hand-over, seconds": charged_s(),
        "dollars, functions that live for ever": undisturbed.bill.cost_usd,
        "dollars, short lives": short.bill.cost_usd,
    }
    for name, value in figures.items():
        print(f"{name:40} {value}")
    if options.output:
        options.output.write_text(json.dumps(figures, indent=1) + "\n")
    if not figures["same bits"]:
        raise SystemExit("the bits differ")


if __name__ == "__main__":
    main()
