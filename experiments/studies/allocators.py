"""What training a model takes of memory and processor time with one allocator and another.

Each is a process of its own, which trains on a few micro-batches at once, as a stage of GPipe does. `held` is what
torch's tensors take at their peak; then, for each allocator, the peak of the process above what it was before the model
was there, as a multiple of that, and the processor seconds of a step (the least of several, in turn).
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch

from funcpipe.core import MB
from funcpipe.platforms import allocator
from funcpipe.platforms.memory import peak_memory_bytes
from funcpipe.profiler.live import live_bytes
from funcpipe.profiler.remote.exercise import exercise

MODELS = ("simulator_real", "models.resnet", "models.unet", "models.densenet", "models.mobilenet")
ALLOCATORS = ("glibc", "glibc, one heap", "tcmalloc")
MICRO_BATCHES, STEPS = 4, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--train", nargs=2, metavar=("MODEL", "ALLOCATOR"), help="be the process, and print its figures"
    )
    options = parser.parse_args()
    if options.train:
        print(json.dumps(train(*options.train)))
        return
    print(f"{'model':16} {'held MB':>8}" + "".join(f" {name:>22}" for name in ALLOCATORS))
    for model in MODELS:
        held = 0.0
        rows: dict[str, list[list[float]]] = {name: [] for name in ALLOCATORS}
        for _ in range(options.repeats):
            for name, row in rows.items():
                held, *figures = start(model, name)
                row.append(figures)
        cells = (f"x {median(r[0] for r in row) / held:5.2f} {min(r[1] for r in row):8.3f} s" for row in rows.values())
        print(f"{model:16} {held / MB:8.0f}" + "".join(f" {cell:>22}" for cell in cells), flush=True)


def start(model: str, name: str) -> list[float]:
    """What one process tells: bytes held, bytes of its peak, and seconds of a step."""
    words = [sys.executable, "-m", "experiments.studies.allocators", "--train", model, name]
    env = {**os.environ, **(allocator.variables() if name == "tcmalloc" else {})}
    figures: list[float] = json.loads(subprocess.run(words, env=env, stdout=subprocess.PIPE, check=True).stdout)
    return figures


def train(model: str, name: str) -> tuple[int, int, float]:
    """Train for a few steps; the tensors' peak is told by a last one."""
    preloaded = "libtcmalloc_minimal" in Path("/proc/self/maps").read_text()
    if preloaded != (name == "tcmalloc"):
        raise SystemExit(f"{name!r} was asked for, and tcmalloc is {'' if preloaded else 'not '}loaded")
    if name == "glibc, one heap":
        allocator.settle()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    file = importlib.import_module(f"experiments.{model}")
    exercise()
    before = peak_memory_bytes()
    network, inputs, target = file.model(), file.sample(), file.target()

    def step() -> None:
        for loss in [file.loss(network(*inputs), target) for _ in range(MICRO_BATCHES)]:
            loss.backward()

    seconds = []
    for _ in range(STEPS):
        began_s = time.process_time()
        step()
        seconds.append(time.process_time() - began_s)
    peak = peak_memory_bytes() - before
    constant = sum(t.nbytes for t in (*network.parameters(), *network.buffers()))
    gradients = sum(p.grad.nbytes for p in network.parameters() if p.grad is not None)
    return live_bytes(step)[1] + constant + gradients, peak, min(seconds[1:])


if __name__ == "__main__":
    main()
