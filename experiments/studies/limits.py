"""Limits that are imposed on local functions, beside what functions measure; and a job that is trained within them."""

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from experiments.cuts import even_cuts
from experiments.models import digits
from experiments.studies.limited import burn, fill, live, move
from funcpipe import FuncPipe
from funcpipe.core import MB, FunctionSize, Pins, PlatformSpec, ProbeSpec
from funcpipe.platforms.base import Handle, State, Status
from funcpipe.platforms.catalog import load_spec
from funcpipe.platforms.local.platform import LocalPlatform, local_functions

LIFETIME_S = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", action="store_true", help="train the demo's model within the limits too")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "functions with more vCPUs")
    print(f"{'limit':34} {'imposed':>12} {'measured':>12} {'off':>8}")
    for memory_mb in (256, 512, 1024):
        show("memory at the kill, MB", memory_mb, memory_at_kill(memory_mb))
    for vcpu in (0.25, 0.579, 1.158):
        show("processors", vcpu, processors(vcpu))
    for bytes_s in (20e6, 40.5e6, 70e6):
        up, down = bandwidths(bytes_s)
        show("upload, MB/s", bytes_s / 1e6, up / 1e6)
        show("download, MB/s", bytes_s / 1e6, down / 1e6)
    show("lifetime, s", LIFETIME_S, lifetime(), absolute=True)
    if options.job:
        job()


def show(name: str, imposed: float, measured: float, *, absolute: bool = False) -> None:
    off = f"{measured - imposed:+7.3f}s" if absolute else f"{100 * (measured / imposed - 1):+7.2f}%"
    print(f"{name:34} {imposed:12.3f} {measured:12.3f} {off}")


def memory_at_kill(memory_mb: int) -> float:
    """What a function had last when it was killed for its memory."""
    with function(fill, spec(memory_mb=memory_mb)) as (said, status):
        assert status.reason == f"out of memory: {memory_mb} MB", status
        return float(said.read_text()) / MB


def processors(vcpu: float) -> float:
    """The processor time of a function that computes on all processors, over the time that it took."""
    with function(burn, spec(vcpu=vcpu)) as (said, _):
        return float(said.read_text())


def bandwidths(bytes_s: float) -> tuple[float, float]:
    """Bytes per second up and down of a function that moves long bodies, by the time beyond that of empty ones."""
    with function(move, spec(bytes_s=bytes_s)) as (said, _):
        up, down = json.loads(said.read_text())
        return up, down


def lifetime() -> float:
    """Seconds from a function's beginning to its end, when it would live on."""
    with function(live, spec(lifetime_s=LIFETIME_S)) as (said, status):
        assert status.reason == f"timed out after {LIFETIME_S:g} s", status
        return float(said.read_text())


@contextmanager
def function(act: Callable[[ProbeSpec, Path], None], imposed: PlatformSpec) -> Iterator[tuple[Path, Status]]:
    """Run `act` in a function within the limits; what it wrote, and how it ended."""
    functions = local_functions(imposed, "experiments.studies.limited:entry", imposed=True)
    with tempfile.TemporaryDirectory() as folder, functions as platform:
        size = imposed.sizes[0]
        probe = ProbeSpec(
            run=f"{act.__name__}:{folder}",
            number=0,
            size=size.name,
            memory_mb=size.memory_mb,
            storage=Path(folder, "objects").as_uri(),
            platform=platform.url,
            time_s=60.0,
        )
        yield Path(folder, "said"), ended(platform, platform.invoke(probe))


def ended(platform: LocalPlatform, handle: Handle) -> Status:
    while (status := platform.status(handle)).state is State.RUNNING:
        time.sleep(0.01)
    return status


def spec(
    *, memory_mb: int = 1024, vcpu: float = 2.0, bytes_s: float = 70e6, lifetime_s: float | None = None
) -> PlatformSpec:
    size = FunctionSize(
        name="one", memory_mb=memory_mb, vcpu=vcpu, upload_bytes_s=bytes_s, download_bytes_s=bytes_s, price_usd_s=0.0
    )
    return replace(load_spec("aws-lambda"), sizes=(size,), lifetime_s=lifetime_s, cold_start_s=0.0)


def job() -> None:
    """Train the demo's network on local functions, and on such with the limits of AWS Lambda: the same bits."""
    states = []
    for like in (None, "aws-lambda"):
        torch.manual_seed(0)
        pipe = FuncPipe(digits.model(), loss_fn=digits.loss, optimizer=digits.optimizer)
        profile = pipe.profile(digits.sample(), platform="aws-lambda", micro_batch=8)
        plan = pipe.optimize(global_batch=64, time_value=3.84, pins=Pins(cuts=even_cuts(profile, 2), replicas=(2,)))
        began_s = time.monotonic()
        result = pipe.train(digits.train_data, epochs=6, plan=plan, like=like)
        where = "local" if like is None else f"local --like {like}"
        sizes = ", ".join(stage.size for stage in plan.stages)
        print(
            f"{where:24} {len(result.losses)} steps on 2 x ({sizes}) in {time.monotonic() - began_s:.1f} s, "
            f"loss {result.losses[0]:.4f} -> {result.losses[-1]:.4f}"
        )
        states.append(result.state_dict())
    free, limited = states
    equal = all(torch.equal(tensor, limited[name]) for name, tensor in free.items())
    print(f"all {len(free)} tensors have the same bits: {equal}")


if __name__ == "__main__":
    main()
