"""The client's memory when it profiles, plans and trains a Llama-like model whose weights lie in files.

    python -m experiments.studies.large_models --layers 22 --width 2048 --steps 2

writes weights of random numbers in bf16 to shards, one layer after another, and runs the rest in a process of its own,
whose peak of resident memory it reads after each verb. With `--held`, the same module is given as it is. With
`--lora 16` it is frozen but for adapters of that rank. The bytes of the last checkpoint are compared with what learns.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from funcpipe import FuncPipe
from funcpipe.comm.weight_files import entries_of, read_head
from funcpipe.model.deferred import Construction
from funcpipe.model.tensors import named_tensors
from funcpipe.platforms.catalog import open_storage

WORDS = 4096


def config(layers: int, width: int) -> LlamaConfig:
    heads = width // 64
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 4, 1),
        vocab_size=WORDS,
        dtype="bfloat16",
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


def make(layers: int, width: int, rank: int = 0) -> LlamaForCausalLM:
    model = LlamaForCausalLM(config(layers, width)).bfloat16()
    if rank:
        for layer in model.requires_grad_(False).model.layers:
            own = layer.self_attn
            own.q_proj, own.v_proj = Adapted(own.q_proj, rank), Adapted(own.v_proj, rank)
    return model


def write(folder: Path, layers: int, width: int) -> int:
    """Write the weights of one layer to each file, and all others to one more; return their bytes."""
    model = Construction().run(partial(make, layers, width))
    groups: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in named_tensors(model).items():
        parts = name.split(".")
        groups.setdefault(parts[2] if "layers" in parts else "others", {})[name] = tensor
    where: dict[str, str] = {}
    for group, own in groups.items():
        contents = {name: 0.02 * torch.randn(tensor.shape, dtype=torch.bfloat16) for name, tensor in own.items()}
        save_file(contents, folder / f"{group}.safetensors")
        where |= dict.fromkeys(own, f"{group}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return sum(tensor.nbytes for own in groups.values() for tensor in own.values())


def data(samples: int, length: int) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": (ids := torch.randint(0, WORDS, (length,))), "labels": ids} for _ in range(samples)]


def measured(found: dict[str, Any], verb: str, began_s: float) -> None:
    status = Path("/proc/self/status").read_text()
    (peak_kb,) = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")]
    found[verb] = {"seconds": round(time.monotonic() - began_s, 1), "peak_mb": peak_kb // 1024}
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


def client(folder: Path, layers: int, width: int, *, length: int, steps: int, held: bool, rank: int) -> None:
    found: dict[str, Any] = {}
    began_s = time.monotonic()
    measured(found, "imports", began_s)
    factory = partial(make, layers, width, rank)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--held", action="store_true")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK")
    parser.add_argument("--client", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client is not None:
        wanted = {"length": given.length, "steps": given.steps, "held": given.held, "rank": given.lora}
        client(given.client, given.layers, given.width, **wanted)
        return
    with tempfile.TemporaryDirectory(prefix="large-models-") as folder:
        size = write(Path(folder), given.layers, given.width)
        print(f"{size / 1e6:.0f} MB of weights, {size / 2e6:.0f} million parameters", flush=True)
        command = [sys.executable, "-m", "experiments.studies.large_models", "--client", folder, *sys.argv[1:]]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
