"""Emulated accounts of AWS and Alibaba Cloud, on which images of functions are deployed and run as processes.

The storage is Ceph's gateway where it is installed, else moto; for Function Compute it is the tests' OSS.
"""

import io
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3

from experiments.studies.bare_processes import BareRoot
from experiments.studies.platforms_equal import environment, oss_server, said
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
from funcpipe.platforms.catalog import load_spec
from funcpipe.platforms.shared.docker import Docker
from funcpipe.platforms.shared.package import Package
from funcpipe.platforms.shared.polling import Polling
from funcpipe.runstate import keyring
from funcpipe.testing.run_keys import RUN_KEY
from scripts import s3_server
from tests.cloud_emulation.aliyun import aliyun_cloud
from tests.cloud_emulation.aws import aws_cloud
from tests.cloud_emulation.docker import RegistryDocker
from tests.contract.oss_server import ACCESS_KEY, REGION, SECRET_KEY

PACKAGES: dict[str, Callable[[], Package]] = {"aws-lambda": lambda_package, "aliyun-fc": container_package}
POLL = Polling(every_s=1.0)


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
        """When the first line that has all of `words` came; not a number if none has."""
        found = (s for s, line in zip(self.moments_s, self, strict=False) if all(word in line for word in words))
        return next(found, float("nan"))


@contextmanager
def own_keys() -> Iterator[None]:
    """Meanwhile the keys of runs lie in a folder of their own, and that of the reference in one process is known."""
    with (
        tempfile.TemporaryDirectory() as folder,
        environment({keyring.FOLDER: folder, keyring.RUN_KEY: RUN_KEY.text}),
    ):
        yield


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
        with redirect_stdout(io.StringIO()):  # it prints what others need to use it
            s3_server.start(Path(folder) / "ceph", 7480)
        try:
            yield "http://127.0.0.1:7480"
        finally:
            s3_server.stop(Path(folder) / "ceph")
