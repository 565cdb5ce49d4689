"""How far a run over functions ends from one process: the largest relative difference of any parameter after 20 steps.

Beside it stands what rounding alone does: one process that takes its micro-batches in reverse order.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from experiments.models import characters, digits
from funcpipe import FuncPipe
from funcpipe.core import OptimizerKind, Plan, ScheduleKind, Sync, Wire
from funcpipe.model.graph import trace
from funcpipe.testing.plans import even_stages
from funcpipe.training.data import Batches
from funcpipe.training.plain import train_in_one_process
from funcpipe.training.recipe import Recipe

SHAPES = ((1, 1), (3, 1), (1, 3), (2, 2), (3, 2))
STEPS = 20
MICRO_BATCH, MICRO_BATCHES = 4, 2
optimizer: Callable[..., torch.optim.Optimizer] = partial(torch.optim.SGD, lr=0.01, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print(f"{'model':12} {'precision':9} stages x replicas   functions   one process, reversed")
    for module in (digits, characters):
        for dtype in (torch.float64, torch.float32):
            for stages, replicas in SHAPES:
                run, control = differences(module, dtype, stages, replicas)
                name, precision = module.__name__.split(".")[-1], str(dtype).removeprefix("torch.")
                rows.append({"model": name, "precision": precision, "stages": stages, "replicas": replicas})
                rows[-1] |= {"functions": run, "reversed": control}
                print(f"{name:12} {precision:9} {stages} x {replicas:<15} {run:11.2e} {control:11.2e}", flush=True)
    if options.output:
        options.output.write_text(json.dumps(rows, indent=1) + "\n")


def differences(module: ModuleType, dtype: torch.dtype, stages: int, replicas: int) -> tuple[float, float]:
    torch.manual_seed(1)
    model = module.model().to(dtype)
    inputs, targets = module.train_data().tensors
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    plan = even_plan(model, (inputs[:MICRO_BATCH],), stages, replicas)
    samples = (STEPS // 2 - 1) * plan.global_batch + MICRO_BATCH + 1  # the last batch of each of two epochs is short
    data = torch.utils.data.TensorDataset(inputs[:samples], targets[:samples])
    batches = Batches(samples=samples, global_batch=plan.global_batch, micro_batch=MICRO_BATCH, seed=0)
    steps = [step for epoch in range(2) for step in batches.epoch(epoch)]
    assert len(steps) == STEPS
    graph = trace(model, (inputs[:MICRO_BATCH],))
    plain, control = (
        train_in_one_process(
            model, graph, data, steps, recipe=Recipe(loss=module.loss, optimizer=optimizer), seed=0, reverse=reverse
        )
        for reverse in (False, True)
    )
    FuncPipe(model, loss_fn=module.loss, optimizer=optimizer).train(data, epochs=2, plan=plan)
    return distance(model, plain), distance(control, plain)


def even_plan(model: nn.Module, sample: tuple[Tensor, ...], stages: int, replicas: int) -> Plan:
    names = [layer.name for layer in trace(model, sample).layers]
    return Plan(
        global_batch=MICRO_BATCH * MICRO_BATCHES * replicas,
        micro_batch=MICRO_BATCH,
        replicas=replicas,
        schedule=ScheduleKind.GPIPE,
        sync=Sync.PIPELINED,
        wire=Wire.FP32,
        optimizer=OptimizerKind.MOMENTUM,
        platform="local",
        stages=even_stages(names, stages),
    )


def distance(found: nn.Module, expected: nn.Module) -> float:
    pairs = zip(found.parameters(), expected.parameters(), strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


if __name__ == "__main__":
    main()
