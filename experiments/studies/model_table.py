"""Models nobody here wrote, and our own: how each is traced, whether it trains right, and how well its memory is
foretold.

Each is trained for three steps by 3 stages x 2 replicas on this machine (six by 3 x 1) and, on the same micro-batches,
by plain PyTorch. `control` is how far plain PyTorch ends from itself when it adds up its micro-batches in reverse
order: networks with ReLU, or with BatchNorm on few samples, amplify rounding. `--double` shows that it is rounding and
nothing else.
"""

import argparse
import gc
import importlib
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from experiments.studies.model_zoo import ZOO, Samples
from funcpipe import FuncPipe
from funcpipe.core import ModelProfile, OptimizerKind, Plan, PlatformSpec, ScheduleKind, Stage, Sync, Wire
from funcpipe.errors import FuncPipeError
from funcpipe.model.graph import LayerGraph, trace
from funcpipe.model.tensors import tree_map
from funcpipe.partitioner.cost.evaluate import evaluate
from funcpipe.platforms.catalog import load_spec
from funcpipe.profiler.profile import profile
from funcpipe.testing.plans import even_stages
from funcpipe.training.data import Batches, MapDataset, load_batch
from funcpipe.training.plain import train_in_one_process
from funcpipe.training.recipe import Recipe

STAGES, MICRO_BATCHES, STEPS, SEED = 3, 2, 6, 0
optimizer: Callable[..., torch.optim.Optimizer] = partial(torch.optim.SGD, lr=0.01)
Loss = Callable[[Any, Any], torch.Tensor]

OURS = {
    "ResNet-101": "resnet:model",
    "AmoebaNet-D (18, 256)": "amoebanet:model",
    "AmoebaNet-D (36, 256)": "amoebanet:model_36",
    "BERT-Large": "bert:model",
    "DenseNet-121": "densenet:model",
    "U-Net": "unet:model",
    "MobileNetV3-style": "mobilenet:model",
    "two towers": "two_tower:model",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="names of models, or their beginnings")
    parser.add_argument("--schedule", choices=[schedule.value for schedule in ScheduleKind], default="gpipe")
    parser.add_argument("--replicas", type=int, default=2, help="of each stage; fewer take less memory")
    parser.add_argument("--trace", action="store_true", help="only trace, and compare with the model once")
    parser.add_argument("--verify", action="store_true", help="only say what `verify` says of two steps")
    parser.add_argument("--double", action="store_true", help="compute in 64-bit floats")
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    options = parser.parse_args()
    rows = []
    print(HEADER_OF_VERIFY if options.verify else HEADER, flush=True)
    for name in (*ZOO, *OURS):
        if options.only and not any(name.startswith(start) for start in options.only):
            continue
        try:
            model, data, loss = from_zoo(name) if name in ZOO else from_ours(name)
            if options.double:
                model, data = model.double(), InDouble(data)
            if options.trace:
                print(traced(name, model, data), flush=True)
                continue
            if options.verify:
                print(verified(name, model, data, loss, options.replicas), flush=True)
                continue
            row = try_model(name, ScheduleKind(options.schedule), options.replicas, model, data, loss)
        except FuncPipeError as error:
            row = {"model": name, "error": f"{type(error).__name__}: {error}"}
        rows.append(row)
        print(shown(row), flush=True)
        if options.output:
            options.output.write_text(json.dumps(rows, indent=1) + "\n")
        gc.collect()


def from_zoo(name: str) -> tuple[nn.Module, MapDataset, Loss]:
    torch.manual_seed(SEED)
    return ZOO[name].model().train(), Samples(ZOO[name], samples(name)), lambda output, target: output.loss


def from_ours(name: str) -> tuple[nn.Module, MapDataset, Loss]:
    file, _, factory = OURS[name].partition(":")
    module = importlib.import_module(f"experiments.models.{file}")
    torch.manual_seed(SEED)
    tensors = [tensor[torch.arange(samples(name)) % len(tensor)] for tensor in (*module.sample(), module.target())]
    return getattr(module, factory)(), torch.utils.data.TensorDataset(*tensors), module.loss


class InDouble(torch.utils.data.Dataset[Any]):
    """The samples with 64-bit floats."""

    def __init__(self, data: MapDataset) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        return tree_map(self._data[index], lambda leaf: leaf.double() if leaf.is_floating_point() else leaf)


def micro_batch(name: str) -> int:
    return {"two towers": 16, "AmoebaNet-D (36, 256)": 1}.get(name, 2)


def samples(name: str) -> int:
    return (STEPS * MICRO_BATCHES - 1) * micro_batch(name)  # the last batch is short


def traced(name: str, model: nn.Module, data: MapDataset) -> str:
    """How a model is traced: its tracer, its layers, how long that took, notes."""
    first = load_batch(data, range(micro_batch(name)))
    start = time.perf_counter()
    graph = trace(model, first.args, first.kwargs)
    took_s = time.perf_counter() - start
    return f"| {name} | {graph.tracer} | {len(graph.layers)} | {took_s:.1f} | {'; '.join(graph.notes)} |"


def verified(name: str, model: nn.Module, data: MapDataset, loss: Loss, replicas: int) -> str:
    """What `verify` says of two steps by three stages, and which tensor comes nearest to what it may differ by."""
    size = micro_batch(name)
    first = load_batch(data, range(size))
    start = time.perf_counter()
    graph = trace(model, first.args, first.kwargs)
    stages = even_stages([layer.name for layer in graph.layers], STAGES)
    plan = plan_of(stages, graph, load_spec("local"), size, ScheduleKind.GPIPE, replicas)
    said = FuncPipe(model, loss_fn=loss, optimizer=optimizer).verify(
        data, steps=2, plan=plan, seed=SEED, message_deadline_s=600.0
    )
    nearest = max(said.tensors, key=lambda tensor: tensor.difference / said.allowed(tensor))
    worst = f"{nearest.name}: {nearest.difference:.1e} of {said.allowed(nearest):.1e}"
    verdict = "agrees" if said.agrees else "differs"
    return f"| {name} | {verdict} | {len(said.tensors)} | {worst} | {time.perf_counter() - start:.0f} |"


def try_model(
    name: str, schedule: ScheduleKind, replicas: int, model: nn.Module, data: MapDataset, loss: Loss
) -> dict[str, Any]:
    """One row of the table."""
    spec = load_spec("local")
    size = micro_batch(name)
    first = load_batch(data, range(size))
    start = time.perf_counter()
    graph = trace(model, first.args, first.kwargs)
    trace_s = time.perf_counter() - start
    measured = profile(
        graph,
        first.args,
        first.kwargs,
        spec=spec,
        micro_batch=size,
        loss=lambda output: loss(output, first.target),
    )
    plan = balanced_plan(graph, measured, spec, schedule, replicas)
    expected = one_process(model, graph, data, loss, plan)
    control = largest_difference(one_process(model, graph, data, loss, plan, reverse=True), expected)[0]
    pipe = FuncPipe(model, loss_fn=loss, optimizer=optimizer)
    result = pipe.train(data, plan=plan, seed=SEED, message_deadline_s=600.0)
    difference, worst = largest_difference(dict(model.state_dict()), expected)
    stages = evaluate(plan, measured, spec).stages
    peaks = [max(w.peak_memory_bytes for w in result.workers if w.worker.startswith(f"s{i}.")) for i in range(STAGES)]
    return {
        "model": name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tracer": graph.tracer,
        "layers": len(graph.layers),
        "trace_s": trace_s,
        "difference": difference,
        "control": control,
        "worst_tensor": worst,
        "predicted_mb": [round(stage.memory_bytes / 2**20) for stage in stages],
        "state_mb": [round(stage.state_bytes / 2**20) for stage in stages],
        "activation_mb": [round(stage.activation_bytes / 2**20) for stage in stages],
        "measured_mb": [round(size / 2**20) for size in peaks],
        "failed_tracers": [f"{attempt.tracer}: {attempt.failure}" for attempt in graph.attempts if attempt.failure],
        "notes": list(graph.notes),
    }


def one_process(
    model: nn.Module, graph: LayerGraph, data: MapDataset, loss: Loss, plan: Plan, *, reverse: bool = False
) -> dict[str, torch.Tensor]:
    """The state that plain PyTorch reaches."""
    batches = Batches(samples=len(data), global_batch=plan.global_batch, micro_batch=plan.micro_batch, seed=SEED)
    steps = list(batches.epoch(0))
    trained = train_in_one_process(
        model, graph, data, steps, recipe=Recipe(loss=loss, optimizer=optimizer), seed=SEED, reverse=reverse
    )
    return dict(trained.state_dict())


def largest_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest difference of any element and its tensor, relative to the tensor's largest element.

    Or to a millionth of the model's largest, which is rounding: the bias of attention's keys, for one, has a gradient
    of zero.
    """
    largest = max(float(tensor.abs().max()) for tensor in expected.values() if tensor.is_floating_point())
    found_differences = (
        (
            float((found[name].double() - tensor.double()).abs().max())
            / max(float(tensor.abs().max()), 1e-6 * largest),
            name,
        )
        for name, tensor in expected.items()
        if tensor.numel()
    )
    return max(found_differences)


def balanced_plan(
    graph: LayerGraph, measured: ModelProfile, spec: PlatformSpec, schedule: ScheduleKind, replicas: int
) -> Plan:
    """Stages that compute about as long as each other."""
    total = sum(layer.forward_s[0] + layer.backward_s[0] for layer in measured.layers)
    cuts, done = [0], 0.0
    for i, layer in enumerate(measured.layers):
        if done >= total * len(cuts) / STAGES and i > cuts[-1] and len(cuts) < STAGES:
            cuts.append(i)
        done += layer.forward_s[0] + layer.backward_s[0]
    while len(cuts) < STAGES:
        cuts.append(cuts[-1] + 1)
    cuts = [min(cut, len(measured.layers) - STAGES + i) for i, cut in enumerate(cuts)]
    names, ends = [layer.name for layer in graph.layers], [*cuts[1:], len(measured.layers)]
    size = spec.sizes[-1]
    stages = tuple(
        Stage(first=first, stop=stop, size=size.name, memory_mb=size.memory_mb, layers=tuple(names[first:stop]))
        for first, stop in zip(cuts, ends, strict=True)
    )
    return plan_of(stages, graph, spec, measured.micro_batch, schedule, replicas)


def plan_of(
    stages: tuple[Stage, ...],
    graph: LayerGraph,
    spec: PlatformSpec,
    micro_batch: int,
    schedule: ScheduleKind,
    replicas: int,
) -> Plan:
    """The plan with these stages."""
    return Plan(
        global_batch=micro_batch * MICRO_BATCHES * replicas,
        micro_batch=micro_batch,
        replicas=replicas,
        schedule=schedule,
        sync=Sync.PIPELINED,
        wire=Wire.FP32,
        optimizer=OptimizerKind.SGD,
        model=graph.name,
        platform=spec.name,
        stages=stages,
    )


HEADER_OF_VERIFY = "| model | verify | tensors | nearest to what it may differ by | s |\n" + "|---" * 5 + "|"
HEADER = (
    "| model | parameters | tracer | layers | trace s | difference | control | predicted MB | measured MB | off |\n"
    + "|---" * 10
    + "|"
)


def shown(row: dict[str, Any]) -> str:
    """A row of a Markdown table."""
    if "error" in row:
        return f"| {row['model']} | {row['error'].splitlines()[0]} |"
    off = [
        f"{100 * (told / found - 1):+.0f} %"
        for told, found in zip(row["predicted_mb"], row["measured_mb"], strict=True)
    ]
    cells: Sequence[str] = (
        row["model"],
        f"{row['parameters'] / 1e6:.1f} M",
        row["tracer"],
        str(row["layers"]),
        f"{row['trace_s']:.1f}",
        f"{row['difference']:.1e}",
        f"{row['control']:.1e}",
        " ".join(map(str, row["predicted_mb"])),
        " ".join(map(str, row["measured_mb"])),
        " ".join(off),
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
