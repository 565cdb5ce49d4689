"""Whether this machine's GPU computes the bits of plain PyTorch, holds what is planned, and is as fast as predicted.

Ten kinds of networks are trained plainly and by plans (`gpu_equality.py`); what six kinds hold of the device, and of
the host, is compared with what was predicted (`gpu_memory.py`); and so is the speed of one stage and of two, beside
that of the lanes between device and host (`gpu_speed.py`).

Without a GPU all of it runs on the tests' stand-in, which computes on the processor: the first line says which it was.
Its speed says nothing of a GPU, and is not judged. Exits with 1 where any bit differs, memory is off by more than 10 %,
one stage reaches less than 0.95 of a plain loop's speed, or two less than 0.9 of the predicted one.

    python -m experiments.studies.gpu --json gpu.json
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from experiments.studies import gpu_equality, gpu_memory, gpu_speed
from funcpipe.core import MB
from funcpipe.partitioner.cost.formulas import DRIVER_BYTES
from funcpipe.platforms.gpus import model_named
from funcpipe.training.device import compute_deterministically
from tests.support import stand_in
from tests.support.run_keys import RUN_KEY
from tests.support.stand_in_device import NAME

STAND_IN = "the stand-in: there is no GPU here"

OFF, ONE_STAGE, TWO_STAGES = 0.1, 0.95, 0.9
"""The share by which predicted memory may be wrong, and the shares of speed that are to be reached."""

EQUALITY = "{network:12} {stages:6} {replicas:8} {fate:>11} {difference:10.1e} {s:7.2f} {plain_s:7.2f}"
PEAK = "{network:12} {predicted_mb:12.2f} {measured_mb:11.2f} {off:+7.1%}"
LANE = "{mb:4} {to_device:14.2f} {to_host:8.2f} {received:17.2f} {sent:6.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; return what the process is to exit with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the tables here too")
    options = parser.parse_args(arguments)
    found = torch.accelerator.current_accelerator(check_available=True)
    device = NAME if found is None else found.type
    if found is None:
        stand_in.install()
    real = device != NAME
    where = name_of(device) if real else STAND_IN
    print(f"on {where}\n")
    began_s = time.monotonic()
    compute_deterministically()
    with keys_of_tests():
        tables = measure(device)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"device": where, "is_real": real, **tables}, indent=2) + "\n")
    missed = misses(tables, speed=real)
    print(
        f"\nin {time.monotonic() - began_s:.0f} s on {where}:",
        "missed" if missed else "all that is judged is as wanted",
    )
    for miss in missed:
        print(f"missed: {miss}")
    return 1 if missed else 0


def name_of(device: str) -> str:
    """Return the name of a GPU."""
    name: str = torch.get_device_module(device).get_device_name()
    return name


@contextlib.contextmanager
def keys_of_tests() -> Iterator[None]:
    """Meanwhile runs have the key that everybody knows."""
    with tempfile.TemporaryDirectory() as keys:
        own = {"FUNCPIPE_RUN_KEY": RUN_KEY.text, "FUNCPIPE_KEY_DIR": keys}
        with mock.patch.dict(os.environ, own):
            yield


def measure(device: str) -> dict[str, Any]:
    """Measure everything, and print it meanwhile."""
    title = f"{'network':12} {'stages':>6} {'replicas':>8} {'fate':>11} {'difference':>10} {'s':>7} {'plain s':>7}"
    rows = gpu_equality.rows(device, micro_batch=4 if device == NAME else 64)
    return {"equality": printed(title, EQUALITY, rows), **measure_memory(device), **measure_speed(device)}


def measure_memory(device: str) -> dict[str, Any]:
    """Measure what is held of both memories."""
    title = f"{'network':12} {'predicted MB':>12} {'measured MB':>11} {'off':>7}"
    print("\nmemory of the device")
    on_device = printed(title, PEAK, gpu_memory.device_peaks(device, micro_batch=4 if device == NAME else 1024))
    print("\nmemory of the host, beside what a process has before it begins")
    on_host = printed(title, PEAK, gpu_memory.host_peaks(device))
    had = "a process begins with {base_mb:.0f} MB, of which {driver_mb:.0f} came with the device".format(**on_host[0])
    print(f"{had}; planned are {DRIVER_BYTES // MB}")
    return {"device_memory": on_device, "host_memory": on_host}


def measure_speed(device: str) -> dict[str, Any]:
    """Measure lanes and stages."""
    speed, of_whom = gpu_speed.REAL, ""
    if device == NAME:
        speed, of_whom = gpu_speed.STAND_IN, ", of the stand-in: not judged"
    print(f"\n10^9 bytes/s between device and host{of_whom}")
    title = f"{'MB':>4} {'pinned: to it':>14} {'to host':>8} {'message: received':>17} {'sent':>6}"
    lanes = printed(title, LANE, gpu_speed.lanes(device))
    model = None if device == NAME else model_named(name_of(device))
    if model is not None:
        print(f"published for {model.name}: {model.host_device_gb_s}")
    print(f"\nseconds of a step{of_whom}")
    one = gpu_speed.one_stage(speed, device)
    print("one stage {stage_s:.3f}, a plain loop {plain_s:.3f}: {speed:.3f} of its speed".format(**one), flush=True)
    message = next(lane for lane in lanes if lane["mb"] == gpu_speed.MESSAGE_MB)
    two = gpu_speed.two_stages(speed, device, min(message["received"], message["sent"]))
    print("two stages, each a process, {observed_s:.3f}, predicted {predicted_s:.3f}: {speed:.3f}".format(**two))
    return {"lanes": lanes, "one_stage": one, "two_stages": two}


def printed(title: str, form: str, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print a table, each row as it comes, and return its rows."""
    print(title, flush=True)
    found = []
    for row in rows:
        found.append(row)
        print(form.format(**row), flush=True)
    return found


def misses(tables: dict[str, Any], *, speed: bool) -> list[str]:
    """Return what is not as wanted; of `speed` only where that is a GPU's."""
    found = [
        "{network} by {stages} x {replicas}, {fate}: other bits".format(**row)
        for row in tables["equality"]
        if not row["equal"]
    ]
    for memory in ("device", "host"):
        rows = tables[f"{memory}_memory"]
        found += [f"{row['network']} on the {memory}: {row['off']:+.1%}" for row in rows if not abs(row["off"]) <= OFF]
    for name, least in (("one_stage", ONE_STAGE), ("two_stages", TWO_STAGES)) if speed else ():
        reached = tables[name]["speed"]
        if not reached >= least:
            found.append(f"{name.replace('_', ' ')}: {reached:.3f} of the speed, wanted are {least}")
    return found


if __name__ == "__main__":
    sys.exit(main())
