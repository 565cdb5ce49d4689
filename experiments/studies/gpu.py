"""Whether stages on this machine's GPU compute the bits of plain PyTorch on it, and hold as much memory as planned.

Functions are threads of this process, which share the GPU. Without one they share the tests' stand-in, which computes
on the processor and says nothing of a GPU's kernels or speed: the first line says which it was. A worker of the last
plan of each network is killed once, and repeats the step. What tensors hold at their peak is compared for networks of
six kinds, each as one stage. Exits with 1 where any bit differs, or a peak by more than 10 %.

    python -m experiments.studies.gpu --json gpu.json
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from funcpipe.core import MB, FaultTolerance, Plan, ScheduleKind
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.training.device import compute_deterministically
from tests.e2e import device_memory
from tests.e2e.networks import RESIDUAL, TRANSFORMER, Network
from tests.e2e.plans import even_plan, momentum, sample_numbers
from tests.e2e.reference import largest_difference, train
from tests.in_process import Killing, make_job, run_workers, states
from tests.support import stand_in
from tests.support.run_keys import RUN_KEY
from tests.support.stand_in_device import NAME

NETWORKS = {"residual": RESIDUAL, "transformer": TRANSFORMER}
CUTS: dict[str, Sequence[tuple[int, int]]] = {"residual": ((1, 1), (3, 1)), "transformer": ((1, 1), (2, 1), (3, 2))}
"""Stages and replicas. Over replicas the statistics of norms are averaged, which rounds otherwise than one process."""

STEPS = 2
ROW = "{network:12} {stages:6} {replicas:8} {killed!s:>6} {difference:10.1e} {s:7.2f} {plain_s:7.2f}"


PEAK = "{network:12} {predicted_mb:12.2f} {counted_mb:10.2f} {off:+7.1%}"
OFF = 0.1
"""The share by which a predicted peak may be wrong."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return what the process is to exit with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the table here too")
    options = parser.parse_args(arguments)
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        stand_in.install()
    device = NAME if found is None else found.type
    is_real = device != NAME
    where = torch.get_device_module(device).get_device_name() if is_real else "the stand-in: there is no GPU here"
    print(f"on {where}\n")
    print(f"{'network':12} {'stages':>6} {'replicas':>8} {'killed':>6} {'difference':>10} {'s':>7} {'plain s':>7}")
    compute_deterministically()
    rows = []
    with tempfile.TemporaryDirectory() as keys:
        own = {"FUNCPIPE_RUN_KEY": RUN_KEY.text, "FUNCPIPE_KEY_DIR": keys}
        with mock.patch.dict(os.environ, own):
            for name, cuts in CUTS.items():
                for stages, replicas in cuts:
                    rows.append(row(name, device, stages, replicas, killed=(stages, replicas) == cuts[-1]))
                    print(ROW.format(**rows[-1]), flush=True)
            peaks = memory(device, micro_batch=1024 if is_real else 4)
    if options.json is not None:
        found_here = {"device": where, "is_real": is_real, "rows": rows, "peaks": peaks}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found_here, indent=2) + "\n")
    differing = sum(found["difference"] > 0 for found in rows)
    wrong = sum(abs(found["off"]) > OFF for found in peaks)
    print(f"\n{len(rows) - differing} of {len(rows)} runs have the bits of plain PyTorch on {where}")
    print(f"{len(peaks) - wrong} of {len(peaks)} networks hold what was predicted, within {OFF:.0%}")
    return 1 if differing or wrong else 0


def memory(device: str, *, micro_batch: int) -> list[dict[str, Any]]:
    """Print and return what tensors hold at their peak: as predicted, and as the device counts it."""
    print(f"\n{'network':12} {'predicted MB':>12} {'counted MB':>10} {'off':>7}")
    peaks = []
    for name, network in device_memory.NETWORKS.items():
        found = device_memory.peak(network, device, micro_batch=micro_batch)
        mb = {"predicted_mb": found.predicted_bytes / MB, "counted_mb": found.counted_bytes / MB}
        peaks.append({"network": name, **mb, "off": found.off})
        print(PEAK.format(**peaks[-1]), flush=True)
    return peaks


def row(name: str, device: str, stages: int, replicas: int, *, killed: bool) -> dict[str, Any]:
    """Train the network of that name by such a plan, and plainly."""
    network = NETWORKS[name]
    plan = even_plan(
        made(network),
        (network.data(2)[0],),
        stages=stages,
        replicas=replicas,
        micro_batch=4,
        micro_batches=2,
        schedule=ScheduleKind.ONE_F_ONE_B,
        recompute=stages == 3,
    )
    samples = list(zip(*network.data(STEPS * plan.global_batch), strict=True))
    found, run_s = timed(lambda: by_plan(network, plan, samples, killed=killed))
    expected, plain_s = timed(lambda: plainly(network, plan, samples, device))
    return {
        "network": name,
        "stages": stages,
        "replicas": replicas,
        "killed": killed,
        "difference": largest_difference(found, expected),
        "s": run_s,
        "plain_s": plain_s,
    }


def made(network: Network) -> torch.nn.Module:
    """A network with the same parameters each time."""
    torch.manual_seed(1)
    return network.model()


def by_plan(network: Network, plan: Plan, samples: Sequence[Any], *, killed: bool) -> dict[str, Tensor]:
    """The state after training by `plan`; if `killed`, a worker dies in the second step."""
    storage = Killing(r"s0\.r0/00000001/put-act") if killed else MemoryStorage()
    job = make_job(made(network), plan, lambda: samples, loss=network.loss, optimizer=momentum)
    workers = run_workers(job, storage, accelerated=True, faults=FaultTolerance(checkpoint_steps=1))
    assert not (isinstance(storage, Killing) and storage.last), "no worker has died"
    return states(workers)


def plainly(network: Network, plan: Plan, samples: Sequence[Any], device: str) -> dict[str, Tensor]:
    """The state after plain training on the device."""
    model, steps = made(network).to(device), sample_numbers(plan, len(samples), epochs=1)
    own: dict[str, Any] = {"steps": steps, "replicas": plan.replicas, "device": device}
    train(model, samples, loss_fn=network.loss, optimizer=momentum, **own)
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}


def timed(work: Callable[[], dict[str, Tensor]]) -> tuple[dict[str, Tensor], float]:
    """What `work` returns, and its seconds."""
    began_s = time.monotonic()
    return work(), time.monotonic() - began_s


if __name__ == "__main__":
    sys.exit(main())
