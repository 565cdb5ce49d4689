"""Where three jobs train: on functions with processors, on functions with a GPU, or on one rented GPU.

    python -m experiments.studies.places

ResNet-101 and BERT-Large train for 1,000 steps of 64 samples, Llama 2 with 7 billion parameters and LoRA for 1,000 of
16. Plans are the cheapest where an hour is worth $10, without starts. Seconds on processors are estimated by the rates
of this machine's, those on GPUs by published rates; rented is the machine with one GPU that holds the model and is the
cheapest by the same value of time.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from experiments.models import bert, resnet
from experiments.studies import large_models
from funcpipe import FuncPipe
from funcpipe.core import ModelProfile
from funcpipe.core.choices import OptimizerKind
from funcpipe.errors import Infeasible
from funcpipe.neighbours.provisioning.workload import model_workload
from funcpipe.platforms.catalog import load_market, load_spec

STEPS, TIME_VALUE = 1000, 10.0
PROCESSORS, GPUS = "aws-lambda", "modal"
ROW = "{job:11} {where:30} {s:12,.0f} {usd:10,.2f} {worth:12,.2f}"


@dataclass(frozen=True)
class Job:
    """A model, what a micro-batch of it is, and the samples of a step."""

    name: str
    pipe: FuncPipe
    sample: Any
    micro_batch: int
    global_batch: int


@contextmanager
def llama() -> Iterator[Job]:
    """The large one, of whose weights there are only headers."""
    shape = large_models.PUBLISHED["7b"]._replace(dtype="bfloat16")
    with TemporaryDirectory() as folder:
        large_models.write_headers(Path(folder), shape)
        optimizer = partial(torch.optim.AdamW, lr=1e-4)
        pipe = FuncPipe(partial(large_models.make, shape, 16), optimizer=optimizer, weights=folder)
        sample = {name: tensor[None] for name, tensor in large_models.data(1, 2048)[0].items()}
        yield Job("7 B, LoRA", pipe, sample, micro_batch=1, global_batch=16)


def jobs() -> Iterator[Job]:
    """Yield the jobs."""
    optimizer = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    for name, models, loss in (
        ("ResNet-101", resnet, torch.nn.functional.cross_entropy),
        ("BERT-Large", bert, bert.loss),
    ):
        pipe = FuncPipe(models.model(), loss_fn=loss, optimizer=optimizer)
        yield Job(name, pipe, models.sample(), micro_batch=4, global_batch=64)
    with llama() as job:
        yield job


def planned(job: Job, platform: str) -> tuple[str, float, float, ModelProfile]:
    """Return the plan on the functions of a platform in words, seconds and dollars of a step, and the profile.

    Plans have functions with one kind of GPU, or none.
    """
    spec = load_spec(platform)
    profile = job.pipe.profile(job.sample, platform=platform, micro_batch=job.micro_batch, repeats=0)
    parts = [(size,) for size in spec.sizes] if platform == GPUS else [spec.sizes]
    found = []
    for sizes in parts:
        with suppress(Infeasible):  # a GPU that is too small
            plan = job.pipe.optimize(
                global_batch=job.global_batch, time_value=TIME_VALUE, spec=replace(spec, sizes=sizes)
            )
            assert plan.estimate is not None
            names = "+".join(dict.fromkeys(stage.size for stage in plan.stages))
            text = f"{platform} {len(plan.stages)} x {plan.replicas} {names}"
            found.append((text, plan.estimate.iteration_s, plan.estimate.cost_usd, profile))
    if not found:
        raise Infeasible(f"no plan holds {job.name}")
    return min(found, key=lambda one: one[2] + one[1] / 3600 * TIME_VALUE)


def rented(job: Job, profile: ModelProfile) -> Iterator[tuple[str, float, float]]:
    """Yield machines with one GPU that holds the model: seconds and dollars of a step."""
    market, work = load_market("aws"), model_workload(profile, load_spec(GPUS), OptimizerKind.SGD)
    gpus = {gpu.name: gpu for gpu in market.gpus}
    for machine in market.machines:
        if machine.gpus != 1 or machine.gpu is None or profile.work is None:
            continue
        gpu = gpus[machine.gpu]
        micro_batch_s = gpu.seconds(profile.work, profile.precision)
        if micro_batch_s is not None and work.memory_mb <= gpu.memory_mb:
            step_s = micro_batch_s * job.global_batch / job.micro_batch
            yield f"rented {machine.name} ({gpu.name})", step_s, step_s * machine.on_demand_usd_h / 3600


def show(job: Job, where: str, step_s: float, step_usd: float) -> None:
    """Print what all steps take."""
    seconds, usd = STEPS * step_s, STEPS * step_usd
    worth = usd + seconds / 3600 * TIME_VALUE
    print(ROW.format(job=job.name, where=where, s=seconds, usd=usd, worth=worth), flush=True)


def main() -> None:
    """Print the table."""
    print(f"{'job':11} {'where':30} {'s':>12} {'$':>10} {'$ with time':>12}")
    for job in jobs():
        for platform in (PROCESSORS, GPUS):
            try:
                text, step_s, step_usd, profile = planned(job, platform)
                show(job, text, step_s, step_usd)
            except Infeasible as error:
                print(f"{job.name:11} {platform}: {error}")
        machines = sorted(rented(job, profile), key=lambda one: one[2] + one[1] / 3600 * TIME_VALUE)
        if machines:
            show(job, *machines[0])
        else:
            print(f"{job.name:11} no rented machine with one GPU holds it")


if __name__ == "__main__":
    main()
