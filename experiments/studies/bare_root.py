"""The images of cloud functions, made and run without a cloud or docker: three runs in the same functions.

The images' Dockerfiles are carried out in a minimal Debian (`bare_image`); functions are processes in it that may do
as little as in a cloud (`bare_processes`), with AWS's own runtime client against the Runtime API, or with our server
for Function Compute. In the last run they hand over. After each run the memory of the environments is told, and whether
it is what it was after the first. The client, the emulated services and the storage (`bare_stands`) share a network
with them that has a loopback and nothing else. Needs root on Linux, debootstrap, and to build the images a network.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.studies.bare_image import Builder, Image
from experiments.studies.bare_processes import BareRoot, memory_mb
from experiments.studies.bare_stands import PACKAGES, STANDS, Stand, own_keys
from experiments.studies.platforms_equal import digest_of, said
from funcpipe.client.job import Job
from funcpipe.client.launch import launch
from funcpipe.client.prepare import prepare
from funcpipe.client.session import session_on
from funcpipe.client.site import Site
from funcpipe.core import FaultTolerance, Outcome, Plan, WorkerReport
from funcpipe.core.logs import BEGINS
from funcpipe.errors import RunError
from funcpipe.platforms.catalog import load_spec, open_storage
from funcpipe.testing.memory_storage import MemoryStorage
from tests.cloud_emulation.images import unpack
from tests.e2e.plans import even_plan
from tests.in_process import make_job, run_workers

TOLERANCE = 0.05  # by how much an environment may have grown since its first run
LIFETIME_S, PAUSE_S = 25.0, 1.5
SHORT, LONG = 4, 12  # steps; a long run takes longer than a function may live
optimizer: Callable[..., torch.optim.Optimizer] = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=Path("out/bare-root"), help="where layers are kept")
    parser.add_argument("--share", nargs="*", default=[], help="folders that builds see, such as pip's certificates")
    parser.add_argument("--on", choices=PACKAGES, nargs="*", default=list(PACKAGES))
    parser.add_argument("--short", type=int, default=2, help="how many short runs there are")
    parser.add_argument(
        "--long", type=int, default=1, help="how many runs come after them in which functions hand over"
    )
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    parser.add_argument("--show", action="store_true", help="show what functions print")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    contexts = {name: options.cache / "context" / PACKAGES[name]().digest for name in options.on}
    images = {}
    for name, folder in contexts.items():
        if not options.inside:
            print(f"== the image of {name}", flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            unpack(PACKAGES[name]().archive(), folder)
        images[folder.name] = Builder(options.cache, options.share, quiet=options.inside).build(folder)
    if options.inside:
        run_all(options, images)
    else:
        alone = ["unshare", "--net", "bash", "-ec", 'ip link set lo up && exec "$@"', "-"]
        again = [sys.executable, "-m", "experiments.studies.bare_root", *sys.argv[1:], "--inside"]
        raise SystemExit(subprocess.run([*alone, *again]).returncode)


def run_all(options: argparse.Namespace, images: dict[str, Image]) -> None:
    torch.set_num_threads(1)
    rows = []
    for name in options.on:
        spec = load_spec(name)
        size = min(spec.sizes, key=lambda size: (size.memory_mb, size.vcpu))
        print(f"== {name}, functions of {size.name} with {size.vcpu:g} vCPU", flush=True)
        bare = BareRoot(images, size.vcpu)
        with own_keys(), STANDS[name](bare, size.name, size.memory_mb, options.show) as stand:
            steps = [SHORT] * options.short + [LONG] * options.long
            rows += [row | {"platform": name, "size": size.name} for row in runs(stand, steps, size.memory_mb)]
        bare.close()
    equal = all(row["equal"] for row in rows)
    print(f"each run has the bits of one process: {'yes' if equal else 'NO'}")
    if options.output:
        options.output.write_text(json.dumps(rows, indent=1) + "\n")
    raise SystemExit(0 if equal else 1)


def runs(stand: Stand, lengths: Sequence[int], limit_mb: int) -> Iterator[dict[str, Any]]:
    """A run of each of so many steps, of which the last hands over; a row for each."""
    watched = Environments(stand, limit_mb)
    for number, steps in enumerate(lengths, start=1):
        job = job_of(steps, stand, limit_mb)
        faults = FaultTolerance(lifetime_s=LIFETIME_S) if steps == LONG else FaultTolerance()
        prepared = prepare(job, session_on(Site(stand.platform, open_storage(stand.url), stand.url)), faults=faults)
        watched.run_begins()
        began_s = time.monotonic()
        try:
            result = launch(prepared)
        except RunError as error:
            said(f"run {number}: {steps} steps failed after {time.monotonic() - began_s:.1f} s: {error}")
            yield {"run": number, "equal": False, "outcome": str(error), "functions": watched.rows()}
            return
        took_s = time.monotonic() - began_s
        equal = digest_of(result.tensors) == digest_of(expected(job))
        handed = sum(report.outcome is Outcome.HANDED_OVER for report in result.workers)
        said(
            f"run {number}: finished, {steps} steps in {took_s:.1f} s, loss {result.losses[0]:.4f} to "
            f"{result.losses[-1]:.4f}; the bits of one process: {'yes' if equal else 'NO'}"
        )
        said(f"   {watched.served()} functions in {len(stand.functions())} environments, {handed} handed over")
        rows, peaks = watched.rows(), [peak_row(stand, report, began_s) for report in result.workers]
        told = {"seconds": took_s, "handed_over": handed, "environments": rows, "peaks": peaks}
        yield {"run": number, "equal": equal, "outcome": "finished", "functions": watched.served(), **told}


def job_of(steps: int, stand: Stand, limit_mb: int) -> Job:
    made = make_job(
        model(),
        plan(stand.size, limit_mb),
        partial(data, steps),
        loss=slow_loss if steps == LONG else nn.functional.cross_entropy,
        optimizer=optimizer,
        deadline_s=300.0,
    )
    return replace(made, prices=stand.platform.spec)


def expected(job: Job) -> dict[str, Tensor]:
    """What one process makes of the job."""
    found: dict[str, Tensor] = {}
    for worker in run_workers(job, MemoryStorage()).values():
        found |= worker.computation.state().state_dict()
    return found


def peak_row(stand: Stand, report: WorkerReport, began_s: float) -> dict[str, Any]:
    """What a function has told of itself, and when it began."""
    words, peak_mb = f"worker={report.worker} attempt={report.attempt}", report.peak_memory_bytes >> 20
    begins_s, task_s = (stand.lines.first_s(words, text) - began_s for text in (BEGINS, "starts at step"))
    said(
        f"   {report.worker} attempt {report.attempt}: {report.outcome.value}, begins after {begins_s:.1f} s, its "
        f"first task after {task_s:.1f} s; it had {peak_mb} MB at most"
    )
    named = {"worker": report.worker, "attempt": report.attempt, "outcome": report.outcome.value}
    return {**named, "begins_s": begins_s, "first_task_s": task_s, "peak_mb": peak_mb}


class Environments:
    """The execution environments of a stand, and what each has taken after the first run that it has served in."""

    def __init__(self, stand: Stand, limit_mb: int) -> None:
        self._stand, self._limit_mb = stand, limit_mb
        self._served: dict[int, int] = {}
        self._first_mb: dict[int, int] = {}

    def run_begins(self) -> None:
        """From here on lines and invocations are those of the next run."""
        self._served = {number: len(one.invoked_s) for number, one in self._numbered()}
        del self._stand.lines[:], self._stand.lines.moments_s[:]

    def served(self) -> int:
        """How many invocations there were in this run."""
        return sum(len(one.invoked_s) for _, one in self._numbered()) - sum(self._served.values())

    def rows(self) -> list[dict[str, Any]]:
        """A row for each environment, with its memory now."""
        return [self._row(number, one) for number, one in self._numbered()]

    def _numbered(self) -> Iterator[tuple[int, Any]]:
        return enumerate(self._stand.functions(), start=1)

    def _row(self, number: int, one: Any) -> dict[str, Any]:
        pss_mb, own_mb = memory_mb(one.process.pid)
        before, served, peak_mb = self._served.get(number, 0), len(one.invoked_s), one.group.peak_mb()
        state, back = "it has ended", None
        if one.alive:
            first_mb = self._first_mb.setdefault(number, pss_mb)
            back = pss_mb <= (1 + TOLERANCE) * first_mb
            state = f"{pss_mb} MB now ({own_mb} MB its own)"
            if served > before > 0:
                state += f", {pss_mb / first_mb - 1:+.1%} since its first run, at most {TOLERANCE:+.0%}: "
                state += "yes" if back else "NO"
        ready_s = (one.ready_s or float("nan")) - one.began_s
        said(
            f"   environment {number}: ready in {ready_s:.1f} s, {served - before} of its {served} "
            f"invocations in this run; {state}; {peak_mb} of {self._limit_mb} MB at most with files"
        )
        told = {"pss_mb": pss_mb, "own_mb": own_mb, "peak_mb": peak_mb, "back": back, "alive": one.alive}
        return {"environment": number, "ready_s": ready_s, "served": served, **told}


def model() -> nn.Module:
    """Half a million parameters: convolutions, a normalisation with running statistics."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 8 * 8, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def data(steps: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(1, 16, 16, generator=generator), torch.tensor(i % 10)) for i in range(8 * steps)]


def slow_loss(output: Tensor, target: Tensor) -> Tensor:
    """The cross entropy, after a while."""
    time.sleep(PAUSE_S)
    return nn.functional.cross_entropy(output, target)


def plan(size: str, memory_mb: int) -> Plan:
    """Two stages, two micro-batches of four."""
    found = even_plan(model(), (data(1)[0][0][None],), stages=2, replicas=1, micro_batch=4, micro_batches=2)
    return replace(found, stages=tuple(replace(s, size=size, memory_mb=memory_mb) for s in found.stages))


if __name__ == "__main__":
    main()
