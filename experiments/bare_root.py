"""The images of cloud functions, made and run without a cloud or docker: three runs in the same functions.

The images' Dockerfiles are carried out in a minimal Debian (`bare_image`); functions are processes in it that may do
as little as in a cloud (`bare_processes`), with AWS's own runtime client against the Runtime API, or with our server
for Function Compute. In the last run they hand over. The client, the emulated services of `tests/cloud_emulation` and
the storage (Ceph's gateway where it is installed, else moto; for OSS the tests' server) share a network with them that
has a loopback and nothing else. Needs root on Linux, debootstrap, and to build the images a network.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import boto3
import torch
from torch import Tensor, nn

from experiments.bare_image import Builder, Image
from experiments.bare_processes import BareRoot, memory_mb
from experiments.platforms_equal import digest_of, environment, oss_server, said
from funcpipe.client.launch import launch
from funcpipe.client.prepare import prepare
from funcpipe.client.session import session_on
from funcpipe.client.site import Site
from funcpipe.core import FaultTolerance, Outcome, Plan
from funcpipe.core.logs import BEGINS
from funcpipe.platforms.aliyun.account import Account as AliyunAccount
from funcpipe.platforms.aliyun.deployment import Deployer as AliyunDeployer
from funcpipe.platforms.aliyun.functions import AliyunPlatform
from funcpipe.platforms.aliyun.template import container_package, shape_of
from funcpipe.platforms.aws.account import Account as AwsAccount
from funcpipe.platforms.aws.deployment import Deployer as AwsDeployer
from funcpipe.platforms.aws.functions import AwsPlatform
from funcpipe.platforms.aws.image import lambda_package
from funcpipe.platforms.aws.template import Shape
from funcpipe.platforms.base import Platform
from funcpipe.platforms.catalog import load_spec, open_storage
from funcpipe.platforms.shared.docker import Docker
from funcpipe.platforms.shared.package import Package
from funcpipe.platforms.shared.polling import Polling
from funcpipe.testing.memory_storage import MemoryStorage
from scripts import s3_server
from tests.cloud_emulation.aliyun import aliyun_cloud
from tests.cloud_emulation.aws import aws_cloud
from tests.cloud_emulation.docker import RegistryDocker
from tests.cloud_emulation.images import unpack
from tests.contract.oss_server import ACCESS_KEY, REGION, SECRET_KEY
from tests.e2e.plans import even_plan
from tests.in_process import make_job, run_workers

PACKAGES: dict[str, Callable[[], Package]] = {"aws-lambda": lambda_package, "aliyun-fc": container_package}
LIFETIME_S, PAUSE_S, POLL = 25.0, 1.5, Polling(every_s=1.0)
SHORT, LONG = 4, 12  # steps; the last of three runs is the long one, and takes longer than a function may live
optimizer: Callable[..., torch.optim.Optimizer] = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


@dataclass(frozen=True, kw_only=True)
class Stand:
    """A deployment on an emulated account; `functions` are its execution environments or instances."""

    platform: Platform
    url: str
    size: str
    functions: Callable[[], Sequence[Any]]
    lines: "Clocked"


class Clocked(list[str]):
    """What functions print, and when each line came."""

    def __init__(self, show: bool) -> None:
        self.moments_s: list[float] = []
        self._show = show

    def append(self, line: str) -> None:
        """Keep a line."""
        if self._show:
            print(f"      {line}", flush=True)
        self.moments_s.append(time.monotonic())
        super().append(line)

    def first_s(self, *words: str) -> float:
        """When the first line that has all of `words` came."""
        return next(s for s, line in zip(self.moments_s, self, strict=False) if all(word in line for word in words))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=Path("out/bare-root"), help="where layers are kept")
    parser.add_argument("--share", nargs="*", default=[], help="folders that builds see, such as pip's certificates")
    parser.add_argument("--on", choices=PACKAGES, nargs="*", default=list(PACKAGES))
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
        run_all(options.on, images, options.output, show=options.show)
    else:
        alone = ["unshare", "--net", "bash", "-ec", 'ip link set lo up && exec "$@"', "-"]
        again = [sys.executable, "-m", "experiments.bare_root", *sys.argv[1:], "--inside"]
        raise SystemExit(subprocess.run([*alone, *again]).returncode)


def run_all(names: Sequence[str], images: dict[str, Image], output: Path | None, *, show: bool) -> None:
    torch.set_num_threads(1)
    rows = []
    for name in names:
        spec = load_spec(name)
        size = min(spec.sizes, key=lambda size: (size.memory_mb, size.vcpu))
        print(f"== {name}, functions of {size.name} with {size.vcpu:g} vCPU", flush=True)
        bare = BareRoot(images, size.vcpu)
        with STANDS[name](bare, size.name, size.memory_mb, show) as stand:
            rows += [row | {"platform": name, "size": size.name} for row in runs(stand, size.memory_mb)]
        bare.close()
    equal = all(row["equal"] for row in rows)
    print(f"each run has the bits of one process: {'yes' if equal else 'NO'}")
    if output:
        output.write_text(json.dumps(rows, indent=1) + "\n")
    raise SystemExit(0 if equal else 1)


def runs(stand: Stand, memory_limit_mb: int) -> Iterator[dict[str, Any]]:
    """Three runs; a row for each."""
    for number, steps in enumerate((SHORT, SHORT, LONG), start=1):
        job = make_job(
            model(),
            plan(stand.size, memory_limit_mb),
            partial(data, steps),
            loss=slow_loss if steps == LONG else nn.functional.cross_entropy,
            optimizer=optimizer,
            deadline_s=300.0,
        )
        job = replace(job, prices=stand.platform.spec)
        faults = FaultTolerance(lifetime_s=LIFETIME_S) if steps == LONG else FaultTolerance()
        prepared = prepare(job, session_on(Site(stand.platform, open_storage(stand.url), stand.url)), faults=faults)
        before = {id(one): len(one.invoked_s) for one in stand.functions()}
        del stand.lines[:], stand.lines.moments_s[:]
        began_s = time.monotonic()
        result = launch(prepared)
        took_s = time.monotonic() - began_s
        expected: dict[str, Tensor] = {}
        for worker in run_workers(job, MemoryStorage()).values():
            expected |= worker.computation.state().state_dict()
        equal = digest_of(result.tensors) == digest_of(expected)
        handed = sum(report.outcome is Outcome.HANDED_OVER for report in result.workers)
        said(
            f"run {number}: {steps} steps in {took_s:.1f} s, loss {result.losses[0]:.4f} to {result.losses[-1]:.4f}, "
            f"{handed} functions handed over; the bits of one process: {'yes' if equal else 'NO'}"
        )
        told = [function_row(stand, one, before.get(id(one), 0), memory_limit_mb) for one in stand.functions()]
        for report in result.workers:
            if report.attempt == 0:
                first_s = stand.lines.first_s(f"worker={report.worker} attempt=0", BEGINS)
                task_s = stand.lines.first_s(f"worker={report.worker} attempt=0", "starts at step")
                said(
                    f"   {report.worker}: the worker begins after {first_s - began_s:.1f} s, its first task after "
                    f"{task_s - began_s:.1f} s; it had {report.peak_memory_bytes >> 20} MB at most"
                )
        yield {"run": number, "equal": equal, "seconds": took_s, "handed_over": handed, "functions": told}


def function_row(stand: Stand, one: Any, served: int, limit_mb: int) -> dict[str, Any]:
    """What an execution environment has taken so far."""
    pss_mb, own_mb = memory_mb(one.process.pid)
    start_s = (one.ready_s or float("nan")) - one.began_s
    peak_mb, new = one.group.peak_mb(), len(one.invoked_s) - served
    state = f"{pss_mb} MB now ({own_mb} MB its own)" if one.alive else "it has ended"
    number = stand.functions().index(one) + 1
    said(
        f"   function {number}: ready in {start_s:.1f} s, {new} of its {len(one.invoked_s)} invocations in this run; "
        f"{state}, {peak_mb} of {limit_mb} MB at most with files"
    )
    return {
        "function": number,
        "ready_s": start_s,
        "served": len(one.invoked_s),
        "pss_mb": pss_mb,
        "own_mb": own_mb,
        "peak_mb": peak_mb,
    }


@contextmanager
def on_aws(bare: BareRoot, size: str, memory_mb: int, show: bool) -> Iterator[Stand]:
    keys = {"AWS_ACCESS_KEY_ID": s3_server.ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": s3_server.SECRET_KEY}
    with tempfile.TemporaryDirectory() as folder, s3_endpoint() as real, aws_cloud(Path(folder)) as cloud:
        cloud.start, cloud.lines = bare, Clocked(show)
        keys |= {"AWS_ENDPOINT_URL": cloud.moto, "AWS_ENDPOINT_URL_LAMBDA": cloud.endpoint}
        cloud.environment |= keys
        with environment({**keys, "AWS_DEFAULT_REGION": "us-east-1"}):
            account = AwsAccount(region="us-east-1", endpoint=cloud.endpoint)
            deployer = AwsDeployer(account, sleep=lambda s: None, say=said, docker=Docker("no-docker"))
            found = deployer.deploy(Shape(name="funcpipe", memory_mb=(memory_mb,)), lambda_package())
            if real:
                boto3.client("s3", endpoint_url=real, region_name="us-east-1").create_bucket(Bucket=found.bucket)
            url = f"s3://{found.bucket}/runs?endpoint={real or cloud.moto}&region=us-east-1"
            said(f"storage {url}")
            platform = AwsPlatform(load_spec("aws-lambda"), account, polling=POLL)
            yield Stand(platform=platform, url=url, size=size, functions=lambda: cloud.environments, lines=cloud.lines)


@contextmanager
def on_aliyun(bare: BareRoot, size: str, memory_mb: int, show: bool) -> Iterator[Stand]:
    keys = {"OSS_ACCESS_KEY_ID": ACCESS_KEY, "OSS_ACCESS_KEY_SECRET": SECRET_KEY}
    with environment(keys), oss_server() as oss, aliyun_cloud() as cloud, tempfile.TemporaryDirectory() as folder:
        cloud.start, cloud.lines = bare, Clocked(show)
        account = AliyunAccount(region=REGION, endpoint=cloud.endpoint)
        docker = RegistryDocker(cloud, Path(folder))
        spec = load_spec("aliyun-fc")
        shape = shape_of(spec, name="funcpipe", sizes=(size,), repository="registry.test/you/funcpipe")
        found = AliyunDeployer(account, say=said, docker=docker, oss=oss.endpoint).deploy(shape, container_package())
        url = f"oss://{found.bucket}/runs?endpoint={oss.endpoint}&region={REGION}"
        said(f"storage {url}")
        yield Stand(
            platform=AliyunPlatform(spec, account, polling=POLL),
            url=url,
            size=size,
            functions=lambda: list(dict.fromkeys(cloud.instances.values())),
            lines=cloud.lines,
        )


STANDS = {"aws-lambda": on_aws, "aliyun-fc": on_aliyun}


@contextmanager
def s3_endpoint() -> Iterator[str | None]:
    """Ceph's gateway with its data in memory, where it is installed."""
    if shutil.which("radosgw") is None or shutil.which("ceph-osd") is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        s3_server.start(Path(folder) / "ceph", 7480)
        try:
            yield "http://127.0.0.1:7480"
        finally:
            s3_server.stop(Path(folder) / "ceph")


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
