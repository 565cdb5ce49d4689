"""A Llama-like model is fine-tuned by functions that cannot hold it, from a client that never does, through failures.

    python -m experiments.studies.large_runs --model 435m --lora 16 --output FILE.json
    python -m experiments.studies.large_runs --model 1b --steps 5 --output FILE.json
    python -m experiments.studies.large_runs --draw FIGURE.png FILE.json OTHER.json

Weights of random numbers are written to files. A client profiles, plans and trains on local functions whose memory is
imposed (`--memory-mb` each); two functions are killed while they compute, and all hand over once. Then one process that
holds the model takes the same steps. Printed are the client's peak of memory after each verb, each function's beside
its plan, the bytes of the last checkpoint beside those of what learns, and which tensors have equal bits. With `--held`
the client holds the model, as one does that is given a module. `--draw` draws the client's memory over time.
"""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from experiments.studies.large_models import PUBLISHED, Shape, data, make, measured, saved_bytes, write
from funcpipe import FuncPipe
from funcpipe.client.follow.callbacks import Callback
from funcpipe.client.follow.results import Progress
from funcpipe.client.prepare.weights import find_weights
from funcpipe.comm.weight_files import fill
from funcpipe.core import FaultTolerance, Outcome, Pins, PlatformSpec
from funcpipe.model.tensors import named_tensors
from funcpipe.platforms.catalog import load_spec, open_storage
from tests.support.processes import functions_of

SHAPES = {"435m": Shape(24, 1280, 3520, 20, 5, 4096), "1b": PUBLISHED["1b"]}
MICRO_BATCHES = 2
LOOK_S = 0.1


def sized(memory_mb: int) -> PlatformSpec:
    """Functions of this machine, all of one size."""
    spec = load_spec("local")
    return replace(spec, sizes=(replace(spec.sizes[-1], name=f"{memory_mb}MB", memory_mb=memory_mb),))


def optimizer_of(given: argparse.Namespace) -> partial[torch.optim.Optimizer]:
    return partial(getattr(torch.optim, given.optimizer), lr=1e-3)


class Killing(Callback):
    """Kills a function of this process after each of these `steps`: the one started first, then the last one."""

    def __init__(self, steps: Sequence[int]) -> None:
        self._steps = list(steps)
        self.killed = 0

    def on_step(self, progress: Progress) -> None:
        if self._steps and progress.step >= self._steps[0]:
            self._steps.pop(0)
            functions = functions_of(os.getpid())
            if functions:
                os.kill(functions[-(self.killed % 2)], signal.SIGKILL)
                self.killed += 1


def digests(tensors: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, str]:
    """Read one tensor after the other, and return the SHA-256 of each."""
    return {name: hashlib.sha256(_bytes(tensors[name].detach())).hexdigest() for name in names}


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def samples(given: argparse.Namespace) -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    return data(MICRO_BATCHES * given.steps, given.length)


def client(given: argparse.Namespace, shape: Shape, weights: Path) -> dict[str, Any]:
    """Profile, plan and train as a user does."""
    verbs: dict[str, Any] = {}
    began_s = time.monotonic()
    spec = sized(given.memory_mb)
    if given.held:
        pipe = FuncPipe(loaded(unset(shape, given.lora), weights), optimizer=optimizer_of(given))
    else:
        pipe = FuncPipe(partial(make, shape, given.lora), optimizer=optimizer_of(given), weights=weights)
    measured(verbs, "FuncPipe", began_s)
    batches = samples(given)
    pipe.profile({name: tensor[None] for name, tensor in batches[0].items()}, platform=spec, micro_batch=1, repeats=1)
    measured(verbs, "profile", began_s)
    pins = Pins(max_functions=given.functions)
    plan = pipe.optimize(global_batch=MICRO_BATCHES, replicas=1, time_value=10, pins=pins)
    measured(verbs, "optimize", began_s)
    assert plan.estimate is not None
    print(f"{len(plan.stages)} stages, {plan.estimate.iteration_s:.1f} s a step", flush=True)
    faults = FaultTolerance(checkpoint_steps=given.checkpoint_steps, lifetime_s=given.life_s, heartbeat_s=1, lease_s=5)
    killing = Killing([given.steps // 4, given.steps // 2][: given.kills])
    runs = weights.parent / "runs"
    result = pipe.train(
        batches,
        plan=plan,
        shuffle=False,
        like=spec,
        faults=faults,
        callbacks=[killing],
        progress=False,
        storage=runs.as_uri(),
        message_deadline_s=600,
    )
    measured(verbs, "train", began_s)
    state = result.state_dict()
    learning = [name for name, parameter in pipe.model.named_parameters() if parameter.requires_grad]
    found = digests(state, learning)
    measured(verbs, "results", began_s)
    saved, of_model = saved_bytes(runs)
    return {
        "verbs": verbs,
        "planned_mb": [stage.memory_bytes >> 20 for stage in plan.estimate.stages],
        "used_mb": [used_mb(result.workers, number) for number in range(len(plan.stages))],
        "losses": result.losses,
        "killed": killing.killed,
        "handed_over": sum(report.outcome is Outcome.HANDED_OVER for report in result.workers),
        "functions": result.bill.functions,
        "checkpoint_bytes": saved,
        "of_the_model": of_model,
        "learning_bytes": sum(named_tensors(pipe.model)[name].nbytes for name in learning),
        "digests": found,
    }


def used_mb(reports: Sequence[Any], stage: int) -> list[int]:
    """The peaks of the functions of a stage that ended by themselves."""
    return [report.peak_memory_bytes >> 20 for report in reports if report.worker.startswith(f"s{stage}.")]


def loaded(model: nn.Module, weights: Path) -> nn.Module:
    """Fill the model with what is in the files, one after another."""
    from safetensors.torch import load_file

    own = named_tensors(model)
    with torch.no_grad():
        for file in sorted(weights.glob("*.safetensors")):
            for name, tensor in load_file(file).items():
                own[name].copy_(tensor)
    return model


def unset(shape: Shape, rank: int) -> nn.Module:
    """Make the model without drawing the numbers that files have."""
    drawn = [mock.patch.object(kind, "reset_parameters") for kind in (nn.Linear, nn.Embedding)]
    with drawn[0], drawn[1], mock.patch.object(LlamaForCausalLM, "init_weights"):
        return make(shape, rank)


def alone(given: argparse.Namespace, shape: Shape, weights: Path) -> dict[str, Any]:
    """Train in one process that holds the model."""
    torch.set_num_threads(1)
    model = loaded(unset(shape, given.lora), weights)
    learning = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer, losses, batches = optimizer_of(given)(list(learning.values())), [], samples(given)
    for step in range(given.steps):
        optimizer.zero_grad()
        total = 0.0
        for sample in batches[MICRO_BATCHES * step : MICRO_BATCHES * (step + 1)]:
            loss = model(**{name: tensor[None] for name, tensor in sample.items()}).loss
            (loss * (1 / MICRO_BATCHES)).backward()
            total += loss.item()
        optimizer.step()
        losses.append(total / MICRO_BATCHES)
    return {"losses": losses, "digests": digests(learning, list(learning))}


def both(given: argparse.Namespace, shape: Shape, folder: Path) -> dict[str, Any]:
    """What a client finds, its memory over time, and what one process finds, if that is wanted."""
    (folder / "weights").mkdir()
    print(f"{write(folder / 'weights', shape, given.lora) / 1e6:.0f} MB of weights", flush=True)
    found = dict[str, Any](alone=None)
    for part in ("client",) if given.not_alone else ("client", "alone"):
        own = ["--part", part, str(folder / "weights"), str(folder / "part.json")]
        series = watched([sys.executable, "-m", "experiments.studies.large_runs", *sys.argv[1:], *own])
        found[part] = json.loads((folder / "part.json").read_text())
        found.setdefault("series", series)
    return found


def watched(command: Sequence[str]) -> list[tuple[float, float]]:
    """Run a command; return its seconds and its resident MB, as they are looked at."""
    began_s, series = time.monotonic(), list[tuple[float, float]]()
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
            series.append((round(time.monotonic() - began_s, 1), pages * os.sysconf("SC_PAGE_SIZE") / 2**20))
            time.sleep(LOOK_S)
    if process.returncode:
        raise SystemExit(process.returncode)
    return series


def read(given: argparse.Namespace, shape: Shape, folder: Path) -> None:
    """Read half of the model's tensors as a function does, over links of these rates and 40 ms."""
    write(folder, shape, given.lora)
    for rate in given.read:
        link = f"{folder.as_uri()}#latency_s=0.04&upload_bytes_s={rate * 1e6}&download_bytes_s={rate * 1e6}"
        stored = sorted(find_weights(link).items())
        targets = [(place, torch.empty(place.shape, dtype=place.dtype)) for _, place in stored[: len(stored) // 2]]
        began_s, cpu_s = time.monotonic(), time.process_time()
        size, took_s = fill(targets, open_storage) / 1e6, time.monotonic() - began_s
        share, cpu_s = 100 * size / took_s / rate, time.process_time() - cpu_s
        print(f"{rate:4.0f} MB/s: {size:.0f} MB in {took_s:.2f} s, {share:.0f} % of the link, {cpu_s:.2f} processor s")


def draw(picture: Path, files: Sequence[Path]) -> None:
    """Draw the client's memory over time in each of the runs that are kept in `files`, which give them their names."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    for file in files:
        series = [(at_s, mb) for at_s, mb in json.loads(file.read_text())["series"] if mb]  # nothing once it has ended
        axes.plot([at_s for at_s, _ in series], [mb for _, mb in series], label=file.stem)
    axes.set(xlabel="seconds", ylabel="resident memory of the client, MB", ylim=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right", fontsize="small")
    figure.savefig(picture)


def show(found: dict[str, Any]) -> None:
    one, run = found["alone"], found["client"]
    equal = sum(run["digests"][name] == digest for name, digest in one["digests"].items()) if one else 0
    print(f"client: {max(mb for _, mb in found['series']):.0f} MB at most")
    for number, (planned, used) in enumerate(zip(run["planned_mb"], run["used_mb"], strict=True)):
        print(f"stage {number}: planned {planned} MB, used {used} MB, {100 * (max(used) / planned - 1):+.0f} %")
    print(f"{run['functions']} functions, {run['killed']} killed, {run['handed_over']} handed over")
    print(f"checkpoint: {run['checkpoint_bytes']:,} bytes, {run['of_the_model']:,} of the model; ", end="")
    print(f"{run['learning_bytes']:,} learn")
    if one:
        print(f"equal bits: {equal} of {len(one['digests'])} tensors; losses {run['losses'] == one['losses']}")
    print([round(loss, 4) for loss in run["losses"]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="435m")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--length", type=int, default=8)
    parser.add_argument("--memory-mb", type=int, default=3072)
    parser.add_argument("--optimizer", default="AdamW")
    parser.add_argument("--functions", type=int, default=2, help="at most so many")
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--life-s", type=float, default=120.0, help="after which a function hands over")
    parser.add_argument("--checkpoint-steps", type=int, default=2)
    parser.add_argument("--float32", action="store_true")
    parser.add_argument("--held", action="store_true", help="give the client the module itself")
    parser.add_argument("--not-alone", action="store_true", help="do not compare with one process")
    parser.add_argument("--output", type=Path)
    parser.add_argument(
        "--read", nargs="+", type=float, metavar="MB/S", help="only read a stage's weights, at these rates"
    )
    parser.add_argument("--draw", nargs="+", type=Path, metavar="FILE", help="a picture, and what runs have written")
    parser.add_argument("--part", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.draw:
        draw(given.draw[0], given.draw[1:])
        return
    shape = SHAPES[given.model]._replace(dtype="float32" if given.float32 else "bfloat16")
    if given.part:
        part, weights, output = given.part
        Path(output).write_text(json.dumps((client if part == "client" else alone)(given, shape, Path(weights))))
        return
    with tempfile.TemporaryDirectory(prefix="large-runs-") as place:
        if given.read:
            read(given, shape, Path(place))
            return
        found = both(given, shape, Path(place))
    show(found)
    if given.output:
        given.output.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
