"""An account of AWS or of Alibaba Cloud as `check` wants it: real, or emulated."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from urllib.parse import urlsplit

from botocore.exceptions import ClientError
from darabonba.exceptions import DaraException

from funcpipe.platforms.aliyun.account import Account as AliyunAccount
from funcpipe.platforms.aliyun.account import bucket_name, code_of, oss_endpoint, role_name
from funcpipe.platforms.aliyun.deployment import Deployer as AliyunDeployer
from funcpipe.platforms.aliyun.functions import POLLING as ALIYUN_POLLING
from funcpipe.platforms.aliyun.functions import AliyunPlatform
from funcpipe.platforms.aliyun.resources import Bucket
from funcpipe.platforms.aliyun.template import container_package, shape_of
from funcpipe.platforms.aws.account import Account as AwsAccount
from funcpipe.platforms.aws.deployment import Deployer as AwsDeployer
from funcpipe.platforms.aws.deployment import lambda_package
from funcpipe.platforms.aws.functions import POLLING as AWS_POLLING
from funcpipe.platforms.aws.functions import AwsPlatform
from funcpipe.platforms.aws.resources import function_name, log_group
from funcpipe.platforms.aws.template import Shape
from funcpipe.platforms.base import StorageUrls
from funcpipe.platforms.catalog import load_spec
from funcpipe.platforms.shared.cloud import Polling
from funcpipe.platforms.shared.package import Docker
from tests.cloud.check import LIFETIME_S, CloudUnderTest

NAME = "funcpipe-check"
BUILD_USD = 0.20  # CodeBuild's general1.medium for 20 minutes at most, aws.amazon.com/codebuild/pricing, 2026-11
_GONE = ("ValidationError", "404", "ResourceNotFoundException", "RepositoryNotFoundException")


def on_aws(
    account: AwsAccount,
    *,
    say: Callable[[str], None],
    docker: Docker | None = None,
    polling: Polling = AWS_POLLING,
    sleep: Callable[[float], None] = time.sleep,
) -> CloudUnderTest:
    """AWS Lambda. What it bills stands in the report that it logs of every invocation, init included (2025-08).

    Of billedDurationMs tells docs.aws.amazon.com/lambda/latest/dg/telemetry-schema-reference.html, 2026-11. Cost
    Explorer tells a day later.
    """
    spec = load_spec("aws-lambda")
    size = min(spec.sizes, key=lambda size: size.memory_mb)
    deployer = AwsDeployer(account, say=say, docker=docker, sleep=sleep)
    platform = AwsPlatform(spec, account, deployment=NAME, polling=polling)
    storage = platform.storage_urls

    def billed_s(since_s: float) -> Sequence[float]:
        pages = (
            account.client("logs")
            .get_paginator("filter_log_events")
            .paginate(
                logGroupName=log_group(NAME),
                startTime=int(since_s * 1000),
                filterPattern='{ $.type = "platform.report" }',
            )
        )
        messages = [event["message"] for page in pages for event in page["events"]]
        found = [json.loads(text) for text in messages if text.startswith("{")]  # moto filters nothing
        reports = [event["record"] for event in found if event.get("type") == "platform.report"]
        return [report["metrics"]["billedDurationMs"] / 1000 for report in reports]

    def left() -> Sequence[str]:
        function, bucket = function_name(NAME, size.memory_mb), urlsplit(storage.client).netloc
        groups = account.client("logs").describe_log_groups(logGroupNamePrefix=log_group(NAME))["logGroups"]
        there = {
            "the stack": _is_there(lambda: account.client("cloudformation").describe_stacks(StackName=NAME)),
            "the bucket": _is_there(lambda: account.client("s3").head_bucket(Bucket=bucket)),
            function: _is_there(lambda: account.client("lambda").get_function_configuration(FunctionName=function)),
            "the repository": _is_there(lambda: account.client("ecr").describe_repositories(repositoryNames=[NAME])),
            "the log group": bool(groups),
        }
        return [what for what, is_there in there.items() if is_there]

    return CloudUnderTest(
        name=f"AWS Lambda, account {account.number}, {account.region}",
        spec=spec,
        size=size,
        build_usd=BUILD_USD,
        deploy=lambda: deployer.deploy(Shape(name=NAME, memory_mb=(size.memory_mb,), watchdog=False), lambda_package()),
        platform=platform,
        storage=storage,
        billed_s=billed_s,
        destroy=lambda: deployer.destroy(NAME),
        left=left,
    )


def _is_there(ask: Callable[[], object]) -> bool:
    try:
        ask()
    except ClientError as error:
        if error.response["Error"]["Code"] in _GONE:
            return False
        raise
    return True


def on_aliyun(
    account: AliyunAccount,
    repository: str,
    *,
    say: Callable[[str], None],
    docker: Docker | None = None,
    polling: Polling = ALIYUN_POLLING,
    oss: str | None = None,
) -> CloudUnderTest:
    """Function Compute. It bills the time that a task ran, which it tells of each task (`durationMs`).

    alibabacloud.com/help/en/functioncompute/fc-3-0/developer-reference/api-fc-2023-03-30-struct-asynctask, 2025-12. The
    image's repository is the user's, and stays.
    """
    spec = load_spec("aliyun-fc")
    size = spec.size("1vCPU-1024MB")
    deployer = AliyunDeployer(account, say=say, docker=docker, oss=oss)
    bucket = bucket_name(NAME, account.number, account.region)
    platform = AliyunPlatform(spec, account, deployment=NAME, polling=polling)
    given = f"oss://{bucket}/runs?endpoint={oss}&region={account.region}"
    storage = platform.storage_urls if oss is None else StorageUrls(client=given, functions=given)

    def billed_s(since_s: float) -> Sequence[float]:
        found = []
        for function in account.deployed(NAME):
            tasks = account.tasks(function.function_name, since_s=since_s)
            found += [task.duration_ms / 1000 for task in tasks if task.duration_ms is not None]
        return found

    def left() -> Sequence[str]:
        there = [function.function_name for function in account.deployed(NAME)]
        role = role_name(NAME, account.region)
        try:
            account.call("ram", "GetRole", "2015-05-01", {"RoleName": role})
            there.append(f"the role {role}")
        except DaraException as error:
            if not code_of(error).startswith("EntityNotExist"):
                raise
        if Bucket(bucket, endpoint=oss or oss_endpoint(account.region, internal=False), region=account.region).exists():
            there.append(f"the bucket {bucket}")
        return there

    shape = shape_of(spec, name=NAME, sizes=(size.name,), repository=repository)
    return CloudUnderTest(
        name=f"Alibaba Function Compute, account {account.number}, {account.region}",
        spec=spec,
        size=size,
        build_usd=0.0,
        deploy=lambda: deployer.deploy(replace(shape, lifetime_s=LIFETIME_S, watchdog=False), container_package()),
        platform=platform,
        storage=storage,
        billed_s=billed_s,
        destroy=lambda: deployer.destroy(NAME),
        left=left,
    )
