import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from funcpipe.core import FunctionSize, PlatformSpec
from funcpipe.platforms.aliyun.account import Account
from funcpipe.platforms.aliyun.deployment import Deployer
from funcpipe.platforms.catalog import load_spec
from funcpipe.platforms.docker import Docker
from funcpipe.platforms.package import Package
from tests.cloud_emulation.aliyun import AliyunCloud, aliyun_cloud
from tests.contract.oss_server import ACCESS_KEY, REGION, SECRET_KEY, OssServer


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
    for prefix in ("ALIBABA_CLOUD", "OSS"):
        monkeypatch.setenv(f"{prefix}_ACCESS_KEY_ID", ACCESS_KEY)
        monkeypatch.setenv(f"{prefix}_ACCESS_KEY_SECRET", SECRET_KEY)
    server = OssServer()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def cloud(oss: OssServer) -> Iterator[AliyunCloud]:
    """An empty account."""
    with aliyun_cloud() as cloud:
        yield cloud


@pytest.fixture
def account(cloud: AliyunCloud) -> Account:
    return Account(region=REGION, endpoint=cloud.endpoint)


@pytest.fixture
def deployer(account: Account, cloud: AliyunCloud, oss: OssServer, tmp_path: Path) -> Deployer:
    docker = RegistryDocker(cloud, tmp_path / "images")
    return Deployer(account, say=lambda text: None, docker=docker, oss=oss.endpoint)


class RegistryDocker(Docker):
    """A docker whose images are folders, and whose registry is the account's."""

    def __init__(self, cloud: AliyunCloud, folder: Path) -> None:
        super().__init__()
        self.cloud = cloud
        self.folder = folder

    def runs(self) -> bool:
        return True

    def build(self, package: Package, image: str) -> None:
        package.write(self.folder / package.digest)

    def push(self, image: str) -> None:
        self.cloud.keep_image(image, self.folder / image.rpartition(":")[2])

    def has_pushed(self, image: str) -> bool:
        return image in self.cloud.images
