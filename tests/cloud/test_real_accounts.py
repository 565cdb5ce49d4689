"""The demo's job on real accounts: only where FUNCPIPE_CLOUD_TESTS=1 says so, within FUNCPIPE_CLOUD_BUDGET_USD.

Credentials and region are those of `funcpipe deploy`; Alibaba Cloud also needs FUNCPIPE_TEST_REPOSITORY
and a docker that is logged in there. What each run cost is printed (`pytest -s`); everything is destroyed afterwards.
"""

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from funcpipe.api import FuncPipe
from funcpipe.client.results import RunResult
from funcpipe.core import Plan, PlatformSpec
from funcpipe.platforms.aliyun import account as aliyun
from funcpipe.platforms.aliyun.deployment import Deployer as AliyunDeployer
from funcpipe.platforms.aliyun.template import container_package, shape_of
from funcpipe.platforms.aws import account as aws
from funcpipe.platforms.aws.deployment import Deployer as AwsDeployer
from funcpipe.platforms.aws.image import lambda_package
from funcpipe.platforms.aws.template import Shape
from funcpipe.platforms.catalog import load_spec
from tests.e2e import small

NAME, LIFETIME_S = "funcpipe-test", 900
BUILD_USD = 0.20  # CodeBuild's general1.medium for 20 minutes at most, aws.amazon.com/codebuild/pricing, 2026-11

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(os.environ.get("FUNCPIPE_CLOUD_TESTS") != "1", reason="FUNCPIPE_CLOUD_TESTS=1 spends money"),
]


def test_aws_trains_as_this_machine_does() -> None:
    spec = load_spec("aws-lambda")
    plan = affordable(spec, "1024MB", BUILD_USD)
    account = aws.Account()
    deployer = AwsDeployer(account, say=print)
    try:
        deployer.deploy(Shape(name=NAME, memory_mb=(1024,)), lambda_package())
        compare(plan, spec, f"aws-lambda://{NAME}?region={account.region}")
    finally:
        deployer.destroy(NAME)


def test_alibaba_cloud_trains_as_this_machine_does() -> None:
    repository = os.environ.get("FUNCPIPE_TEST_REPOSITORY")
    if repository is None:
        pytest.skip("FUNCPIPE_TEST_REPOSITORY names no repository for the image")
    spec = load_spec("aliyun-fc")
    plan = affordable(spec, "1vCPU-1024MB", 0.0)
    account = aliyun.Account()
    deployer = AliyunDeployer(account, say=print)
    shape = shape_of(spec, name=NAME, sizes=("1vCPU-1024MB",), repository=repository)
    try:
        deployer.deploy(replace(shape, lifetime_s=LIFETIME_S), container_package())
        compare(plan, spec, f"aliyun-fc://{NAME}?region={account.region}")
    finally:
        deployer.destroy(NAME)


def affordable(spec: PlatformSpec, size: str, more_usd: float) -> Plan:
    """A plan that cannot cost more than the budget, even if every function runs for its whole life."""
    plan = small.plan(2, 2)
    plan = replace(plan, stages=tuple(replace(stage, size=size, memory_mb=1024) for stage in plan.stages))
    functions = len(plan.stages) * plan.replicas
    worst_usd = functions * LIFETIME_S * spec.size(size).price_usd_s + more_usd
    budget_usd = float(os.environ.get("FUNCPIPE_CLOUD_BUDGET_USD", "0.5"))
    assert worst_usd <= budget_usd, f"this may cost ${worst_usd:.2f}, the budget is ${budget_usd:.2f}"
    return plan


def compare(plan: Plan, spec: PlatformSpec, url: str) -> None:
    """Processors differ from machine to machine, and so may the last bits."""
    found, expected = (run(plan, spec, platform) for platform in (url, "local"))
    print(f"{url}: {found.bill.function_seconds:.1f} s of functions, ${found.bill.cost_usd:.6f}")
    torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-6)


def run(plan: Plan, spec: PlatformSpec, platform: str) -> RunResult:
    torch.manual_seed(0)
    train: Callable[..., RunResult] = FuncPipe(small.model(), loss_fn=F.cross_entropy, optimizer=small.optimizer).train
    return train(small.data, plan=plan, platform=platform, prices=spec)
