"""What proves that funcpipe works on a cloud account: the same on real accounts and on the emulated ones of the tests.

It deploys, measures the functions, trains a network on handwritten digits with a kill and a hand-over, compares the
result with one process, puts our bill beside the cloud's own record of what it will bill, destroys, and looks for what
is left.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from funcpipe.client.follow.launch import launch
from funcpipe.client.follow.results import Progress, RunResult
from funcpipe.client.prepare.job import Job
from funcpipe.client.prepare.prepared_run import prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import FaultTolerance, FunctionSize, Outcome, Plan, PlatformSpec, RunLimits, RunSettings
from funcpipe.platforms.base import Deployment, StorageUrls
from funcpipe.platforms.catalog import open_storage
from funcpipe.platforms.function_group import StartedFunction
from funcpipe.runstate.documents import exists
from funcpipe.runstate.functions import list_functions
from funcpipe.runstate.generations import list_generations
from funcpipe.runstate.signing import signed
from funcpipe.testing.memory_storage import MemoryStorage
from tests.cloud.digits import data, model, optimizer, paused_loss
from tests.e2e.plans import even_plan
from tests.in_process import make_job, run_workers

LIFETIME_S = 900
RUN, KILL_AT_STEP = "check", 3
RUN_USD, MEASURE_USD = 0.10, 0.02
CLOSE = 1e-4
"""The most that parameters may differ, relatively: processors differ from machine to machine, and so may last bits."""

CLOSE_BILL = 0.3
"""The most that our bill for functions, which live some seconds each, may differ from what the cloud has recorded."""


@dataclass(frozen=True, kw_only=True)
class CloudUnderTest:
    """An account of a cloud, and what is to be done on it.

    `billed_s` tells of the invocations since a moment how long the cloud bills each, as far as it has said so yet;
    `left` names what is still there of the deployment.
    """

    name: str
    spec: PlatformSpec
    size: FunctionSize
    build_usd: float
    deploy: Callable[[], object]
    platform: Deployment
    storage: StorageUrls
    billed_s: Callable[[float], Sequence[float]]
    destroy: Callable[[], None]
    left: Callable[[], Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long the run takes: its steps, a pause in each, and after how long a function hands over."""

    steps: int
    pause_s: float
    lifetime_s: float


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the check has found. Functions cost `ours_usd` by our bill, and `theirs_usd` by what the cloud bills."""

    measured: PlatformSpec
    result: RunResult
    equal: bool
    difference: float
    ours_usd: float
    theirs_usd: float
    left: tuple[str, ...]

    @property
    def failures(self) -> tuple[str, ...]:
        """What is not as it must be."""
        handed_over = any(report.outcome is Outcome.HANDED_OVER for report in self.result.workers)
        killed = self.result.bill.functions > len(self.result.workers)
        facts = {
            "no function handed over": handed_over,
            "no function was killed": killed,
            f"parameters differ by {self.difference:.1e}": self.difference <= CLOSE,
            f"functions cost ${self.ours_usd:.6f} by our bill, ${self.theirs_usd:.6f} by the cloud's record": (
                abs(self.ours_usd - self.theirs_usd) <= CLOSE_BILL * self.theirs_usd
            ),
            f"left: {', '.join(self.left)}": not self.left,
        }
        return tuple(text for text, holds in facts.items() if not holds)


def most_usd(cloud: CloudUnderTest) -> float:
    """What the check costs at most: a build, a measurement, a run, and three functions that outlive it to their end."""
    return cloud.build_usd + MEASURE_USD + RUN_USD + 3 * LIFETIME_S * cloud.size.price_usd_s


def check(cloud: CloudUnderTest, pace: Pace, *, max_usd: float, say: Callable[[str], None]) -> Found:
    """Do all of it; what was deployed is removed, whatever happens. Ends at once if it may cost more."""
    say(f"{cloud.name}: this spends ${most_usd(cloud):.2f} at most, of ${max_usd:.2f}")
    if most_usd(cloud) > max_usd:
        raise SystemExit(f"the check may cost ${most_usd(cloud):.2f}, which is more than --max-usd {max_usd:g}")
    try:
        cloud.deploy()
        platform = cloud.platform
        site = Site(platform, open_storage(cloud.storage.client), cloud.storage.functions)
        measured = replace(site, platform=platform.of_deployed_sizes()).measure(max_usd=MEASURE_USD)
        say(f"measured: {_sizes_text(measured)}, {1000 * measured.latency_s:.0f} ms for a request")
        began_s = time.time()
        result = train(cloud, site, pace, say)
        billed = _await_bill(cloud, began_s, result.bill.functions)
    finally:
        cloud.destroy()
    equal, difference = compare(result, reference(cloud, pace))
    theirs_usd = sum(billed) * cloud.size.price_usd_s
    found = Found(
        measured=measured,
        result=result,
        equal=equal,
        difference=difference,
        ours_usd=result.bill.compute_usd,
        theirs_usd=theirs_usd,
        left=tuple(cloud.left()),
    )
    say(f"parameters as of one process, bit for bit: {'yes' if equal else f'no, they differ by {difference:.1e}'}")
    bill = result.bill
    say(
        f"our bill: ${bill.cost_usd:.6f}, of which ${found.ours_usd:.6f} for {bill.functions} functions of "
        f"{bill.function_seconds:.1f} s; the cloud's record: {len(billed)} invocations, for which it bills "
        f"{sum(billed):.1f} s, ${theirs_usd:.6f} at list prices"
    )
    say(f"left: {', '.join(found.left) or 'nothing'}")
    return found


def train(cloud: CloudUnderTest, site: Site, pace: Pace, say: Callable[[str], None]) -> RunResult:
    """Train, and end a function from outside after some steps: another one, if it has ended itself before that."""
    faults = FaultTolerance(lifetime_s=pace.lifetime_s, checkpoint_steps=2)
    limits, settings = RunLimits(max_usd=RUN_USD), RunSettings(name=RUN)
    prepared = prepare(_job(cloud, pace), session_on(site), faults=faults, limits=limits, settings=settings)
    killed: list[StartedFunction] = []

    def show(progress: Progress) -> None:
        say(f"step {progress.step} of {progress.steps}: loss {progress.loss:.4f}, ${progress.cost_usd:.6f}")
        if progress.step < KILL_AT_STEP:
            return
        (keys,) = list_generations(site.storage, RUN)
        if all(exists(site.storage, keys.worker_report(one.worker, one.attempt)) for one in killed):
            *_, victim = list_functions(signed(site.storage), keys)  # of the last stage, its last attempt
            killed.append(victim)
            say(f"ending {victim.worker}, {victim.handle.name}")
            site.platform.stop(victim.handle)

    return launch(prepared, show)


def reference(cloud: CloudUnderTest, pace: Pace) -> dict[str, Tensor]:
    """The parameters after the same steps in one process."""
    found: dict[str, Tensor] = {}
    for worker in run_workers(_job(cloud, replace(pace, pause_s=0.0)), MemoryStorage()).values():
        found |= worker.computation.state().state_dict()
    return found


def compare(result: RunResult, expected: dict[str, Tensor]) -> tuple[bool, float]:
    """Whether all bits are equal, and the largest difference relative to a tensor's largest value."""
    assert result.tensors.keys() == expected.keys()
    pairs = [(result.tensors[name].double(), expected[name].double()) for name in expected]
    difference = max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-12)) for a, b in pairs)
    return all(torch.equal(result.tensors[name], expected[name]) for name in expected), difference


def _job(cloud: CloudUnderTest, pace: Pace) -> Job:
    dataset = data(pace.steps)
    return replace(
        make_job(
            model(),
            _plan(cloud),
            partial(TensorDataset, *dataset.tensors),
            loss=partial(paused_loss, pause_s=pace.pause_s),
            optimizer=optimizer,
            deadline_s=300.0,
        ),
        prices=cloud.spec,
    )


def _plan(cloud: CloudUnderTest) -> Plan:
    """Two stages of one replica, two micro-batches of four."""
    found = even_plan(model(), data(1).tensors[:1], stages=2, replicas=1, micro_batch=4, micro_batches=2)
    size = cloud.size
    stages = tuple(replace(stage, size=size.name, memory_mb=size.memory_mb) for stage in found.stages)
    return replace(found, platform=cloud.spec.name, stages=stages)


def _await_bill(cloud: CloudUnderTest, began_s: float, functions: int) -> Sequence[float]:
    """What the cloud has recorded of a run: records come some time after functions have ended."""
    until_s = time.monotonic() + 120
    while len(billed := cloud.billed_s(began_s)) < functions and time.monotonic() < until_s:
        time.sleep(1)
    return billed


def _sizes_text(spec: PlatformSpec) -> str:
    return ", ".join(f"{size.name} {size.vcpu:.2f} vCPU, {size.download_bytes_s / 1e6:.0f} MB/s" for size in spec.sizes)
