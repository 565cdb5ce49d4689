"""Adam's state divided over the replicas of a stage, and not: memory of a function, traffic of a step, the result."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from funcpipe import FuncPipe
from funcpipe.client.results import RunResult
from funcpipe.core import MB, SYNC_WIRES, ModelProfile, OptimizerKind, Plan, Resource, ScheduleKind, Stage, Sync, Wire
from funcpipe.partitioner.cost.evaluate import evaluate
from funcpipe.platforms.catalog import load_spec

WIDTH, LAYERS, MICRO_BATCH, STEPS = 2048, 6, 4, 6
SIZE = "4096MB"
adam = partial(torch.optim.Adam, lr=1e-4)


@dataclass(frozen=True)
class Run:
    """One run: megabytes of the hungriest function, and bytes of a step of the busiest."""

    predicted_mb: float
    measured_mb: float
    sent_bytes: int
    received_bytes: int
    state: Mapping[str, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", default="2,3,4", help="numbers of replicas (default: %(default)s)")
    parser.add_argument("--wire-sync", choices=[wire.value for wire in SYNC_WIRES], default="fp32")
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pipe = FuncPipe(model(), loss_fn=F.mse_loss, optimizer=adam)
    profile = pipe.profile((torch.zeros(MICRO_BATCH, WIDTH),), platform="local", micro_batch=MICRO_BATCH)
    parameter_bytes = sum(layer.parameter_bytes for layer in profile.layers)
    print(f"{parameter_bytes / MB:.0f} MB of parameters, Adam, one stage, {STEPS} steps; memory in MB, traffic a step")
    columns = ("replicas", "divided", "predicted", "measured", "off", "sent MB", "received MB")
    print("  ".join(f"{name:>11}" for name in columns), "  bits")
    rows, wire = [], Wire(options.wire_sync)
    for replicas in map(int, options.replicas.split(",")):
        whole, divided = (run(profile, replicas, wire, sharded=sharded) for sharded in (False, True))
        same = all(torch.equal(tensor, whole.state[name]) for name, tensor in divided.state.items())
        for sharded, found in ((False, whole), (True, divided)):
            rows.append({"replicas": replicas, "divided": sharded, "same_bits": same})
            rows[-1] |= {name: value for name, value in vars(found).items() if name != "state"}
            print(f"{replicas:>11}  {'yes' if sharded else 'no':>11}  {line(found)}   {'same' if same else 'DIFFER'}")
    if options.output:
        options.output.write_text(json.dumps(rows, indent=1) + "\n")


def line(found: Run) -> str:
    off = f"{100 * (found.measured_mb / found.predicted_mb - 1):+.1f}%"
    memory = f"{found.predicted_mb:>11.0f}  {found.measured_mb:>11.0f}  {off:>11}"
    return f"{memory}  {found.sent_bytes / MB:>11.3f}  {found.received_bytes / MB:>11.3f}"


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def data(replicas: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    samples = STEPS * MICRO_BATCH * replicas
    return TensorDataset(*(torch.randn(samples, WIDTH, generator=generator) for _ in range(2)))


def run(profile: ModelProfile, replicas: int, wire: Wire, *, sharded: bool) -> Run:
    plan = plan_of(profile, replicas, wire, sharded=sharded)
    pipe = FuncPipe(model(), loss_fn=F.mse_loss, optimizer=adam)
    result = pipe.train(data(replicas), plan=plan, message_deadline_s=300.0)
    return Run(
        predicted_mb=evaluate(plan, profile, load_spec("local")).peak_memory_bytes / MB,
        measured_mb=max(worker.peak_memory_bytes for worker in result.workers) / MB,
        sent_bytes=busiest(result, Resource.UPLOAD),
        received_bytes=busiest(result, Resource.DOWNLOAD),
        state=result.state_dict(),
    )


def busiest(result: RunResult, lane: Resource) -> int:
    """The most that a replica moves in a step."""
    moved: dict[tuple[int, int], int] = {}
    for event in result.trace.events:
        if event.lane is lane:
            place = event.replica, event.step
            moved[place] = moved.get(place, 0) + event.payload_bytes
    by_replica = {replica: [b for (r, _), b in moved.items() if r == replica] for replica, _ in moved}
    return round(max(median(steps) for steps in by_replica.values()))


def plan_of(profile: ModelProfile, replicas: int, wire: Wire, *, sharded: bool) -> Plan:
    layers = tuple(name for layer in profile.layers for name in layer.graph_layers)
    return Plan(
        global_batch=MICRO_BATCH * replicas,
        micro_batch=MICRO_BATCH,
        replicas=replicas,
        schedule=ScheduleKind.GPIPE,
        sync=Sync.STREAMED,
        wire=Wire.FP32,
        wire_sync=wire,
        shard_optimizer=sharded,
        optimizer=OptimizerKind.ADAM,
        platform="local",
        stages=(Stage(first=0, stop=len(profile.layers), size=SIZE, memory_mb=4096, layers=layers),),
    )


if __name__ == "__main__":
    main()
