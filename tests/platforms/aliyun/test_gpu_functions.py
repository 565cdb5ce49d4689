"""Functions with a GPU on Function Compute: their settings, their image, and what the service has not."""

import functools
from dataclasses import replace
from functools import partial

import pytest

from funcpipe.core import FunctionSize, PlatformSpec
from funcpipe.core.accelerator import Accelerator
from funcpipe.errors import InvalidValue, PlatformRefused
from funcpipe.platforms.aliyun.account import Account
from funcpipe.platforms.aliyun.deployment import Deployer
from funcpipe.platforms.aliyun.functions import AliyunPlatform
from funcpipe.platforms.aliyun.template import Shape, container_package, shape_of
from funcpipe.platforms.catalog import load_spec, with_gpu_instances
from tests.cloud_emulation.aliyun import AliyunCloud
from tests.e2e import small
from tests.platforms.aliyun.conftest import OFTEN, size

SPEC = with_gpu_instances(load_spec("aliyun-fc"))
NAMES = [size.name for size in load_spec("aliyun-fc-gpu").sizes]
REPOSITORY = "registry.test/you/funcpipe"
cuda = functools.cache(partial(container_package, cuda=True))


def shape(*names: str, spec: PlatformSpec = SPEC) -> Shape:
    return shape_of(spec, name="funcpipe", sizes=names, repository=REPOSITORY, watchdog=False)


def with_gpu(name: str, memory_mb: int, vcpu: float, host_mb: int) -> FunctionSize:
    device = Accelerator(
        name=name, memory_mb=memory_mb, vcpu_equivalents=1.0, fp32_tflop_s=8.0, memory_gb_s=300.0, host_device_gb_s=10.0
    )
    return replace(size(vcpu, host_mb), accelerator=device)


def test_a_deployment_has_cpu_functions_and_gpu_functions(
    deployer: Deployer, cloud: AliyunCloud, account: Account
) -> None:
    """The emulator admits what the vendor's table has."""
    deployer.deploy(shape("1vCPU-2048MB", *NAMES), cuda())
    found = {name: function.get("gpuConfig") for name, function in cloud.functions.items()}
    assert found == {
        "funcpipe-1vCPU-2048MB": None,
        "funcpipe-tesla-T4-16GB": {"gpuType": "fc.gpu.tesla.1", "gpuMemorySize": 16384},
        "funcpipe-ampere-A10-24GB": {"gpuType": "fc.gpu.ampere.1", "gpuMemorySize": 24576},
        "funcpipe-ada-48GB": {"gpuType": "fc.gpu.ada.1", "gpuMemorySize": 49152},
    }
    done = len(cloud.calls)
    deployer.deploy(shape("1vCPU-2048MB", *NAMES), cuda())
    assert [call for call in cloud.calls[done:] if not call.startswith(("Get", "List"))] == []
    platform = AliyunPlatform(SPEC, account, polling=OFTEN).of_deployed_sizes()
    assert {size.name: platform.spec.accelerates(size.name) for size in platform.spec.sizes} == {
        "1vCPU-2048MB": False,
        **dict.fromkeys(NAMES, True),
    }
    plan = small.plan(1, 1)
    plan = replace(plan, stages=(replace(plan.stages[0], size=NAMES[0], memory_mb=32768),))
    platform.check(plan)
    cloud.functions["funcpipe-tesla-T4-16GB"]["gpuConfig"]["gpuType"] = "fc.gpu.ampere.1"
    with pytest.raises(PlatformRefused, match=r"funcpipe-tesla-T4-16GB has fc\.gpu\.ampere\.1: it was changed"):
        platform.check(plan)


def test_their_image_has_cuda_and_its_size_is_said(
    account: Account, cloud: AliyunCloud, deployer: Deployer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PlatformRefused, match="functions with a GPU need an image with CUDA"):
        deployer.deploy(shape(NAMES[0]), container_package())
    assert not cloud.functions
    said = list[str]()
    monkeypatch.setattr(deployer, "_say", said.append)
    deployer.deploy(shape(NAMES[0]), cuda())
    deployer.deploy(shape("1vCPU-2048MB"), container_package())
    texts = [text for text in said if "unpacked" in text]
    assert [text.partition("unpacked")[2] for text in texts] == [", with CUDA", ", without CUDA"]
    assert "making funcpipe-tesla-T4-16GB: 8 vCPU, 32768 MB, fc.gpu.tesla.1" in said
    lines = cuda().files["requirements.txt"].decode()
    assert "+cpu" not in lines
    assert "download.pytorch.org" not in lines
    assert "\ntorch==" in f"\n{lines}"


@pytest.mark.parametrize(
    ("size", "rule"),
    [
        (with_gpu("T4", 8192, 4, 16_384), "must be that of a whole T4, 16 GB: functions have no parts of it, got 8192"),
        (with_gpu("T4", 16_384, 10, 32_768), r"with a fc\.gpu\.tesla\.1, at most 8 vCPU and at most 32768 MB"),
        (with_gpu("T4", 16_384, 8, 65_536), "at most 8 vCPU and at most 32768 MB"),
        (with_gpu("T4", 16_384, 8, 1000), r"with a fc\.gpu\.tesla\.1"),
        (with_gpu("Ada", 49_152, 2, 32_768), "4 or 8 or 16 vCPU and 32768 or 65536 or 98304 MB"),
        (with_gpu("Hopper", 98_304, 8, 98_304), "16 vCPU and 98304 MB"),
        (with_gpu("L4", 22_888, 4, 16_384), "GPU must be one of T4, A10, Ada, Hopper, got 'L4'"),
    ],
)
def test_what_the_service_has_not_is_refused(size: FunctionSize, rule: str) -> None:
    with pytest.raises(InvalidValue, match=rule):
        Shape(name="funcpipe", sizes=(size,), repository=REPOSITORY)


def test_a_whole_hopper_is_admitted(deployer: Deployer, cloud: AliyunCloud) -> None:
    hopper = with_gpu("Hopper", 96_000_000_000 >> 20, 16, 98_304)
    deployer.deploy(Shape(name="funcpipe", sizes=(hopper,), repository=REPOSITORY, watchdog=False), cuda())
    (function,) = cloud.functions.values()
    assert function["gpuConfig"] == {"gpuType": "fc.gpu.hopper.1", "gpuMemorySize": 98304}
