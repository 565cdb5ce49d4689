import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from funcpipe.core import FunctionSize, Plan, PlatformSpec
from funcpipe.platforms.aliyun import account as accounts
from funcpipe.platforms.aliyun.account import Account
from funcpipe.platforms.aliyun.deployment import Deployer
from funcpipe.platforms.aliyun.functions import AliyunPlatform
from funcpipe.platforms.aliyun.template import container_package, shape_of
from funcpipe.platforms.catalog import load_spec
from funcpipe.platforms.shared.cloud import Polling
from tests.cloud_emulation.aliyun import AliyunCloud, aliyun_cloud
from tests.cloud_emulation.docker import RegistryDocker
from tests.cloud_emulation.forks import forked
from tests.contract.oss_server import ACCESS_KEY, REGION, SECRET_KEY, OssServer

SIZE = "1vCPU-1024MB"
EVERY_S = 0.2
OFTEN = Polling(every_s=EVERY_S)


def size(vcpu: float, memory_mb: int) -> FunctionSize:
    name = f"{vcpu:g}vCPU-{memory_mb}MB"
    return FunctionSize(
        name=name, memory_mb=memory_mb, vcpu=vcpu, upload_bytes_s=1e8, download_bytes_s=1e8, price_usd_s=1e-5
    )


@pytest.fixture
def spec() -> PlatformSpec:
    sizes = (size(0.5, 1024), size(1, 1024), size(1, 2048))
    return replace(load_spec("aws-lambda"), name="fc", sizes=sizes, lifetime_s=86_400, max_payload_bytes=131_072)


@pytest.fixture
def oss(monkeypatch: pytest.MonkeyPatch) -> Iterator[OssServer]:
    monkeypatch.setenv("OSS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("OSS_ACCESS_KEY_SECRET", SECRET_KEY)
    with serving(OssServer()) as server:
        yield server


@contextmanager
def serving(server: OssServer) -> Iterator[OssServer]:
    """The server, which answers as long as the context lasts."""
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def cloud(oss: OssServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[AliyunCloud]:
    """An empty account, asked again a few milliseconds after a request that failed."""
    for condition in accounts._RETRIES.retry_condition:
        monkeypatch.setattr(condition.backoff, "period", 1)
    with aliyun_cloud() as cloud:
        cloud.start = forked
        yield cloud


@pytest.fixture
def account(cloud: AliyunCloud) -> Account:
    return Account(region=REGION, endpoint=cloud.endpoint)


@pytest.fixture
def deployer(account: Account, cloud: AliyunCloud, oss: OssServer, tmp_path: Path) -> Deployer:
    docker = RegistryDocker(cloud, tmp_path / "images")
    return Deployer(account, say=lambda text: None, docker=docker, oss=oss.endpoint)


@pytest.fixture
def url(oss: OssServer) -> str:
    return f"oss://funcpipe-1000-cn-test/runs?endpoint={oss.endpoint}&region=cn-test"


@pytest.fixture
def deployed(deployer: Deployer, account: Account, spec: PlatformSpec) -> Account:
    shape = shape_of(spec, name="funcpipe", sizes=(SIZE,), repository="registry.test/you/funcpipe")
    deployer.deploy(replace(shape, lifetime_s=40), container_package())
    return account


@pytest.fixture
def platform(deployed: Account, spec: PlatformSpec) -> AliyunPlatform:
    return AliyunPlatform(spec, deployed, polling=OFTEN)


def sized(plan: Plan, size: str = SIZE) -> Plan:
    return replace(plan, stages=tuple(replace(stage, size=size) for stage in plan.stages))
