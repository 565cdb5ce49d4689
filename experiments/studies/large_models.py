"""The client's memory when it profiles, plans and trains a Llama-like model whose weights lie in files.

    python -m experiments.studies.large_models --layers 22 --width 2048 --steps 2

writes weights of random numbers in bf16 to shards, one layer after another, and runs the rest in a process of its own,
whose peak of resident memory it reads after each verb. With `--held`, the same module is given as it is. With
`--lora 16` it is frozen but for adapters of that rank. The bytes of the last checkpoint are compared with what learns.

    python -m experiments.studies.large_models --planned aws-lambda --model 7b --lora 16 --length 2048 --float32

plans a model without its weights, for functions of a cloud: its files have headers alone, and layers are not timed.
Then it says what a sample takes on GPUs that one can rent (there are no functions with such), and whether one holds it.
With `--figure FILE` it draws a step of one replica on as few functions with an L4 as hold it.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from experiments.studies import gpu_lanes
from funcpipe import FuncPipe
from funcpipe.analysis.predict import predict
from funcpipe.comm.weight_files import entries_of, read_head
from funcpipe.core import ModelProfile, Plan, Precision
from funcpipe.core.choices import OptimizerKind
from funcpipe.errors import Infeasible
from funcpipe.model.deferred import Construction
from funcpipe.model.tensors import named_tensors
from funcpipe.neighbours.provisioning.workload import model_workload
from funcpipe.partitioner.problem.cuts import crossing_bytes
from funcpipe.platforms.catalog import load_market, load_spec, open_storage

WORDS = 4096


class Shape(NamedTuple):
    """The sizes of a Llama-like model."""

    layers: int
    width: int
    inner: int
    heads: int
    shared_heads: int
    words: int
    dtype: str = "bfloat16"


PUBLISHED = {
    "1b": Shape(22, 2048, 5632, 32, 4, 32000),
    "7b": Shape(32, 4096, 11008, 32, 32, 32000),
    "70b": Shape(80, 8192, 28672, 64, 8, 32000),
}
"""TinyLlama, and Llama 2."""


def shape_of(layers: int, width: int) -> Shape:
    heads = width // 64
    return Shape(layers, width, width * 11 // 4, heads, max(heads // 4, 1), WORDS)


def config(shape: Shape) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.shared_heads,
        vocab_size=shape.words,
        dtype=shape.dtype,
    )


class Adapted(nn.Module):
    """A linear layer with what learns beside it."""

    def __init__(self, base_layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.down = nn.Linear(base_layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base_layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base_layer(x) + self.up(self.down(x.float())).to(x.dtype)
        return result


def make(shape: Shape, rank: int = 0) -> LlamaForCausalLM:
    model: LlamaForCausalLM = LlamaForCausalLM(config(shape)).to(getattr(torch, shape.dtype))
    if rank:
        for layer in model.requires_grad_(False).model.layers:
            own = layer.self_attn
            own.q_proj, own.v_proj = Adapted(own.q_proj, rank), Adapted(own.v_proj, rank)
    return model


def write(folder: Path, shape: Shape, rank: int = 0) -> int:
    """Write the weights of one layer to each file, and all others to one more; return their bytes.

    With a `rank`, those of the adapters too, so that a model begins with them wherever it is made.
    """
    model = Construction().run(partial(make, shape, rank))
    kept = model.state_dict().keys()
    groups: dict[str, dict[str, torch.Tensor]] = {}
    for name in kept:
        tensor, parts = named_tensors(model)[name], name.split(".")
        groups.setdefault(parts[2] if "layers" in parts else "others", {})[name] = tensor
    where: dict[str, str] = {}
    for group, own in groups.items():
        contents = {name: (0.02 * torch.randn(tensor.shape)).to(tensor.dtype) for name, tensor in own.items()}
        save_file(contents, folder / f"{group}.safetensors")
        where |= dict.fromkeys(own, f"{group}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return sum(tensor.nbytes for own in groups.values() for tensor in own.values())


def write_headers(folder: Path, shape: Shape) -> int:
    """Write a file with the header of all weights, and with none of their contents; return the bytes of these."""
    entries, end = dict[str, Any](), 0
    for name, tensor in named_tensors(Construction().run(partial(make, shape))).items():
        kind = {"bfloat16": "BF16", "float32": "F32"}[shape.dtype]
        entries[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    header = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
    return end


def data(samples: int, length: int) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": (ids := torch.randint(0, WORDS, (length,))), "labels": ids} for _ in range(samples)]


def measured(found: dict[str, Any], verb: str, began_s: float) -> None:
    """Note the seconds since `began_s`, those of the process in all, and its peak of memory."""
    status = Path("/proc/self/status").read_text()
    (peak_kb,) = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")]
    seconds = {"seconds": round(time.monotonic() - began_s, 1), "processor_s_in_all": round(time.process_time(), 1)}
    found[verb] = {**seconds, "peak_mb": peak_kb // 1024}
    print(verb, found[verb], flush=True)


def saved_bytes(folder: Path) -> tuple[int, int]:
    """The bytes of the newest checkpoint's files below `folder`, and of the tensors of the model in them."""
    files = list(folder.glob("*/g*/checkpoints/s*/*.safetensors"))
    newest = max(file.name[:8] for file in files)
    last = [file for file in files if file.name.startswith(newest)]
    held = sum(
        entry["data_offsets"][1] - entry["data_offsets"][0]
        for file in last
        for name, entry in entries_of(read_head(open_storage(file.parent.as_uri()), file.name)).items()
        if name.startswith("model/")
    )
    return sum(file.stat().st_size for file in last), held


def client(folder: Path, shape: Shape, *, length: int, steps: int, held: bool, rank: int) -> None:
    found: dict[str, Any] = {}
    began_s = time.monotonic()
    measured(found, "imports", began_s)
    factory = partial(make, shape, rank)
    optimizer = partial(torch.optim.SGD, lr=1e-3)
    given: dict[str, Any] = {} if held else {"weights": folder}
    pipe = FuncPipe(factory() if held else factory, optimizer=optimizer, **given)
    measured(found, "FuncPipe", began_s)
    samples = data(4 * max(steps, 1), length)
    sample = {name: tensor[None] for name, tensor in samples[0].items()}
    began_s = time.monotonic()
    found_layers = pipe.profile(sample, platform="local", micro_batch=1, repeats=2)
    measured(found, "profile", began_s)
    count = sum(len(layer.graph_layers) for layer in found_layers.layers)
    print(f"timed {count - len(found_layers.timed_as)} of {count} layers")
    began_s = time.monotonic()
    plan = pipe.optimize(global_batch=4, replicas=1)
    measured(found, "optimize", began_s)
    if steps:
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="large-models-run-") as runs:
            where = {"storage": Path(runs).as_uri(), "message_deadline_s": 300}
            result = pipe.train(samples, plan=plan, progress=False, **where)  # type: ignore[arg-type]
            measured(found, "train", began_s)
            saved, learned = saved_bytes(Path(runs))
        print([round(loss, 4) for loss in result.losses], len(plan.stages), "stages")
        print(f"checkpoint: {saved:,} bytes, of which {learned:,} are of the model")


def plan_only(
    folder: Path, shape: Shape, *, length: int, rank: int, platform: str, layers: int, figure: Path | None
) -> None:
    """Print the seconds and the memory of each verb, the plan, and what rented GPUs would take."""
    found: dict[str, Any] = {}
    began_s = time.monotonic()
    pipe = FuncPipe(partial(make, shape, rank), optimizer=partial(torch.optim.AdamW, lr=1e-4), weights=folder)
    measured(found, "FuncPipe", began_s)
    sample = {name: tensor[None] for name, tensor in data(1, length)[0].items()}
    began_s = time.monotonic()
    profile = pipe.profile(sample, platform=platform, micro_batch=1, repeats=0, layers=layers)
    measured(found, "profile", began_s)
    show_gpus(profile, platform, Precision.BF16 if shape.dtype == "bfloat16" else Precision.FP32)
    spec = load_spec(platform)
    for gpu in dict.fromkeys(None if size.accelerator is None else size.accelerator.name for size in spec.sizes):
        sizes = [s for s in spec.sizes if gpu == (None if s.accelerator is None else s.accelerator.name)]
        began_s = time.monotonic()
        try:
            plan = pipe.optimize(global_batch=16, time_value=10, spec=replace(spec, sizes=tuple(sizes)))
            show_plan(plan, profile)
        except Infeasible as error:
            print(error)
        measured(found, "optimize", began_s)
    if figure is not None:
        sizes = [s for s in spec.sizes if s.accelerator is not None and s.accelerator.name == "L4"]
        small = replace(spec, sizes=tuple(sizes))
        plan = pipe.optimize(global_batch=8, replicas=1, spec=small)
        show_plan(plan, profile)
        gpu_lanes.draw(predict(plan, profile, small), plan, figure)


def show_plan(plan: Plan, profile: ModelProfile) -> None:
    """Print what a step of a plan takes, and what its cuts carry."""
    assert plan.estimate is not None
    carried = crossing_bytes(profile)
    sizes = Counter(stage.size for stage in plan.stages)
    print(f"{len(plan.stages)} stages x {plan.replicas} replicas, {plan.schedule.value}, {dict(sizes)}")
    print(f"{plan.estimate.iteration_s:.1f} s and {plan.estimate.cost_usd:.4f} $ a step of {plan.global_batch} samples")
    if plan.stages[1:]:
        print(f"a cut carries {max(carried[stage.first] for stage in plan.stages[1:]) / 1e6:.1f} MB of a micro-batch")


def show_gpus(profile: ModelProfile, platform: str, precision: Precision) -> None:
    """Print what a sample takes on rented GPUs by their published rates, and whether one of them holds the model."""
    market = load_market("aws")
    work = model_workload(profile, load_spec(platform), OptimizerKind.ADAM)
    for gpu in market.gpus:
        machine = next((one for one in market.machines if one.gpu == gpu.name), None)
        if gpu.name not in ("L4", "T4") or machine is None or profile.work is None:
            continue
        sample_s = gpu.seconds(profile.work, precision)
        assert sample_s is not None
        usd = sample_s * machine.on_demand_usd_h / 3600
        holds = "holds" if work.memory_mb <= gpu.memory_mb else "does not hold"
        print(f"{gpu.name}: {sample_s:.2f} s a sample, {usd:.5f} $; {holds} {work.memory_mb:,.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--held", action="store_true")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK")
    parser.add_argument("--planned", metavar="PLATFORM")
    parser.add_argument("--model", choices=PUBLISHED, help="in place of --layers and --width")
    parser.add_argument("--float32", action="store_true", help="plan weights in float32")
    parser.add_argument("--profiled-layers", type=int, default=30)
    parser.add_argument("--figure", type=Path, help="draw a step of one replica on L4 into this file")
    parser.add_argument("--client", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    shape = PUBLISHED[given.model] if given.model else shape_of(given.layers, given.width)
    shape = shape._replace(dtype="float32" if given.float32 else "bfloat16")
    wanted: dict[str, Any] = {"length": given.length, "rank": given.lora}
    planned = {"layers": given.profiled_layers, "figure": given.figure}
    if given.client is not None and given.planned:
        plan_only(given.client, shape, platform=given.planned, **planned, **wanted)
        return
    if given.client is not None:
        client(given.client, shape, steps=given.steps, held=given.held, **wanted)
        return
    with tempfile.TemporaryDirectory(prefix="large-models-") as folder:
        size = (write_headers if given.planned else write)(Path(folder), shape)
        parameters = size // getattr(torch, shape.dtype).itemsize
        print(f"{size / 1e6:.0f} MB of weights, {parameters / 1e6:.0f} million parameters", flush=True)
        command = [sys.executable, "-m", "experiments.studies.large_models", "--client", folder, *sys.argv[1:]]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
