"""Deployments side by side in one account: names that begin alike, and regions, which share RAM."""

import copy
import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from funcpipe.core import PlatformSpec
from funcpipe.errors import PlatformRefused
from funcpipe.platforms.aliyun.account import Account
from funcpipe.platforms.aliyun.deployment import Deployer
from funcpipe.platforms.aliyun.endings import read_logs
from funcpipe.platforms.aliyun.functions import AliyunPlatform
from funcpipe.platforms.aliyun.template import Shape, container_package, shape_of
from tests.cloud_emulation.aliyun import AliyunCloud, aliyun_cloud
from tests.cloud_emulation.docker import RegistryDocker
from tests.contract.oss_server import OssServer
from tests.platforms.aliyun.conftest import serving

package = functools.cache(container_package)
SIZES = ("0.5vCPU-1024MB", "1vCPU-2048MB")
NEIGHBOUR = "funcpipe-dev"


def shape(spec: PlatformSpec, name: str, *sizes: str) -> Shape:
    return shape_of(spec, name=name, sizes=sizes or SIZES, repository="registry.test/you/funcpipe")


def belongings(cloud: AliyunCloud, oss: OssServer, mark: str) -> list[dict[Any, Any]]:
    """What is there whose name has `mark`, with all that it holds."""
    ram = cloud.ram
    kept: list[dict[Any, Any]] = [cloud.functions, cloud.configs, cloud.triggers, oss.buckets, oss.objects]
    kept += [cloud.logs.projects, ram.roles, ram.policies, ram.attached]
    return copy.deepcopy([{key: value for key, value in found.items() if mark in str(key)} for found in kept])


@pytest.fixture
def other(cloud: AliyunCloud, oss: OssServer, tmp_path: Path) -> Iterator[tuple[AliyunCloud, OssServer, Deployer]]:
    """Another region of the account: its services, and who deploys there."""
    with serving(OssServer("cn-other")) as buckets, aliyun_cloud("cn-other", cloud.ram) as region:
        account = Account(region="cn-other", endpoint=region.endpoint)
        docker = RegistryDocker(region, tmp_path / "other")
        yield region, buckets, Deployer(account, say=lambda text: None, docker=docker, oss=buckets.endpoint)


def test_a_deployment_leaves_one_alone_whose_name_begins_with_its_own(
    deployer: Deployer, cloud: AliyunCloud, oss: OssServer, spec: PlatformSpec
) -> None:
    deployer.deploy(shape(spec, NEIGHBOUR), package())
    oss.objects[f"{NEIGHBOUR}-1000-cn-test/runs/run-1/kept"] = b"1"
    neighbour = belongings(cloud, oss, NEIGHBOUR)
    assert all(neighbour)
    deployer.deploy(shape(spec, "funcpipe"), package())
    deployer.deploy(replace(shape(spec, "funcpipe", SIZES[0]), watchdog=False), package())
    assert belongings(cloud, oss, NEIGHBOUR) == neighbour
    assert sorted(cloud.functions) == sorted(["funcpipe-0_5vCPU-1024MB", *neighbour[0]])
    deployer.destroy("funcpipe")
    assert belongings(cloud, oss, NEIGHBOUR) == neighbour == belongings(cloud, oss, "funcpipe")
    deployer.destroy(NEIGHBOUR)
    assert not any(belongings(cloud, oss, "funcpipe"))


def test_functions_may_not_invoke_those_of_a_deployment_whose_name_begins_with_theirs(
    deployer: Deployer, cloud: AliyunCloud, spec: PlatformSpec
) -> None:
    for name in ("funcpipe", NEIGHBOUR):
        deployer.deploy(shape(spec, name), package())
    role = cloud.functions["funcpipe-1vCPU-2048MB"]["role"].rpartition("/")[2]
    functions = "acs:fc:cn-test:1000:functions"
    for name, may in [("funcpipe", True), (NEIGHBOUR, False)]:
        assert cloud.ram.allows(role, "fc:InvokeFunction", f"{functions}/{name}-1vCPU-2048MB") is may
        for action in ("fc:GetAsyncTask", "fc:StopAsyncTask"):
            assert cloud.ram.allows(role, action, f"{functions}/{name}-0_5vCPU-1024MB/async-tasks/task-1") is may


def test_logs_are_of_one_deployment(
    deployer: Deployer, account: Account, cloud: AliyunCloud, spec: PlatformSpec
) -> None:
    deployer.deploy(shape(spec, NEIGHBOUR), package())
    with pytest.raises(PlatformRefused, match="functions of funcpipe keep no logs, or there are none in cn-test"):
        list(read_logs(account, "funcpipe", "run-1"))
    asked = len(cloud.calls)
    assert list(deployer.logs("funcpipe", since_s=0)) == []
    assert cloud.calls[asked:] == ["ListFunctions"]


def test_regions_with_the_same_deployment_share_no_role(
    deployer: Deployer,
    cloud: AliyunCloud,
    oss: OssServer,
    spec: PlatformSpec,
    other: tuple[AliyunCloud, OssServer, Deployer],
) -> None:
    region, buckets, there = other
    deployer.deploy(shape(spec, "funcpipe"), package())
    here = belongings(cloud, oss, "funcpipe")
    found = there.deploy(shape(spec, "funcpipe"), package())
    assert belongings(region, buckets, "functions-cn-other")
    for one in (cloud, region):
        roles = {function["role"] for function in one.functions.values()}
        assert roles == {f"acs:ram::1000:role/funcpipe-functions-{one.region}"}
        assert {function["state"] for function in one.functions.values()} == {"Active"}
    platform = AliyunPlatform(spec, Account(region=found.region, endpoint=region.endpoint))
    there.destroy("funcpipe")
    assert belongings(cloud, oss, "funcpipe") == here
    with pytest.raises(PlatformRefused, match="there are no functions of funcpipe in cn-other"):
        platform.of_deployed_sizes()


def test_rights_that_differ_from_those_wanted_are_changed(
    deployer: Deployer, cloud: AliyunCloud, oss: OssServer, spec: PlatformSpec
) -> None:
    deployer.deploy(shape(spec, "funcpipe"), package())
    (policy,) = cloud.ram.policies.values()
    wanted = policy.document
    for _ in range(6):  # more often than a policy has versions
        policy.documents[policy.default] = '{"Version": "1", "Statement": []}'
        deployer.deploy(shape(spec, "funcpipe"), package())
        assert policy.document == wanted
    deployer.deploy(shape(spec, "funcpipe", *SIZES, "1vCPU-1024MB"), package())
    assert "funcpipe-1vCPU-1024MB" in policy.document
    deployer.destroy("funcpipe")
    assert cloud.ram.inventory() == []


def test_functions_with_a_role_of_all_regions_are_deployed_again_and_removed(
    deployer: Deployer, cloud: AliyunCloud, spec: PlatformSpec
) -> None:
    deployer.deploy(shape(spec, "funcpipe"), package())
    for function in cloud.functions.values():
        function["role"] = "acs:ram::1000:role/funcpipe-functions"  # as before roles were of one region
    deployer.deploy(replace(shape(spec, "funcpipe", SIZES[0]), watchdog=False), package())
    ((name, function),) = cloud.functions.items()
    assert (name, function["state"]) == ("funcpipe-0_5vCPU-1024MB", "Active")
    assert function["role"] == "acs:ram::1000:role/funcpipe-functions-cn-test"
