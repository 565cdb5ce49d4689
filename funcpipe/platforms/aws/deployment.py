"""Deployments on AWS, set up as one CloudFormation stack and removed again. Both can be repeated safely."""

import base64
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from funcpipe.core import PlatformSpec
from funcpipe.errors import PlatformError, PlatformRefused
from funcpipe.platforms.aws.account import BUILDS, Account, advice, explained, notices
from funcpipe.platforms.aws.functions import bucket_name
from funcpipe.platforms.aws.resources import IMAGE_PARAMETER, SECRET_PARAMETER, Node, log_group
from funcpipe.platforms.aws.template import SOURCES, WATCHDOG_MB, Shape, template_text
from funcpipe.platforms.shared.cloud import new_secret
from funcpipe.platforms.shared.package import Docker, Package, make_package

_POLL_S = 5.0
_DEAD = {"ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "CREATE_FAILED", "DELETE_FAILED", "REVIEW_IN_PROGRESS"}
_GOOD = {"CREATE_COMPLETE", "UPDATE_COMPLETE"}
_KEPT_IN = "us-east-1"  # the region of the two prices below
_REPOSITORY_USD_GB_MONTH = 0.10  # aws.amazon.com/ecr/pricing, 2026-11
_OBJECTS_USD_GB_MONTH = 0.023  # aws.amazon.com/s3/pricing, Standard, us-east-1, 2026-11
_MINUTES_MONTH = 43_200
_WATCHDOG_GB_S = 0.3 * WATCHDOG_MB / 1024
_WATCHDOG_LOG_USD_MONTH = 0.02

Stack = dict[str, Any]


def _ignore(text: str) -> None:
    """Say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildProject:
    """The place of an image: outputs of a deployment's stack, whose `name` is also the build project's."""

    name: str
    bucket: str
    repository: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """The result of a deployment, and the cost of keeping it while nothing runs."""

    name: str
    region: str
    bucket: str
    image: str
    image_bytes: int
    memory_mb: tuple[int, ...]
    watchdog: bool
    keep_days: int

    def keeping_usd_month(self, prices: PlatformSpec) -> float:
        """Dollars a month for image and watchdog; functions, roles, build project and empty bucket cost nothing."""
        image_usd = self.image_bytes / 1e9 * _REPOSITORY_USD_GB_MONTH
        return image_usd + (watchdog_usd_month(prices) if self.watchdog else 0.0)

    def keeping_text(self, prices: PlatformSpec) -> str:
        """Return the cost of keeping it, in words."""
        watchdog = f", ${watchdog_usd_month(prices):.2f} of it for the watchdog" if self.watchdog else ""
        there = f", at the prices of {_KEPT_IN}," if prices.region != _KEPT_IN else ","
        return (
            f"keeping it costs ${self.keeping_usd_month(prices):.2f} a month{watchdog}, with an image of "
            f"{self.image_bytes / 1e9:.2f} GB, and ${_OBJECTS_USD_GB_MONTH} per GB and month for objects of runs{there}"
            f" which expire after {self.keep_days} days; functions cost nothing while they do not run"
            + (f"; {prices.prices_note()}" if prices.prices_note() else "")
        )


def watchdog_usd_month(prices: PlatformSpec) -> float:
    """Dollars a month for a watchdog, which lists runs every minute and asks for one object, in functions of 256 MB."""
    function_usd_gb_s = prices.sizes[0].price_usd_s / prices.sizes[0].memory_mb * 1024
    once_usd = prices.request_usd(1, 1) + prices.price_invocation_usd + _WATCHDOG_GB_S * function_usd_gb_s
    return _MINUTES_MONTH * once_usd + _WATCHDOG_LOG_USD_MONTH


class Deployer:
    """Creates, updates and removes a deployment's stack. `say` is called with messages; `docker` builds images."""

    def __init__(
        self,
        account: Account,
        *,
        say: Callable[[str], None] = _ignore,
        sleep: Callable[[float], None] = time.sleep,
        docker: Docker | None = None,
    ) -> None:
        self._account = account
        self._say, self._sleep, self._docker = say, sleep, docker or Docker()
        self._stacks: Any = account.client("cloudformation")

    def deploy(self, shape: Shape, package: Package) -> Deployed:
        """Create or update the stack; what is up to date is left alone."""
        text = template_text(shape)
        self._say(f"account {self._account.number}, region {self._account.region}, stack {shape.name}")
        stack = self._settled(shape.name)
        if stack is not None and stack["StackStatus"] in _DEAD:
            self._say(f"the stack is left over from a failure ({stack['StackStatus']}): removing it")
            self._remove(shape.name, stack)
            stack = None
        if stack is None:
            self._check_account(shape)
            self._say("creating bucket, roles, repository, logs and build project")
            stack = self._change(self._stacks.create_stack, shape.name, text, image="")
        project = _build_project(shape.name, stack)
        image = ensure_image(self._account, project, package, say=self._say, sleep=self._sleep, docker=self._docker)
        if not self._is(stack, text, image):
            self._say(f"making functions of {', '.join(map(str, shape.memory_mb))} MB")
            self._change(self._stacks.update_stack, shape.name, text, image=image)
        return Deployed(
            name=shape.name,
            region=self._account.region,
            bucket=project.bucket,
            image=image,
            image_bytes=image_bytes(self._account, project, package.digest) or 0,
            memory_mb=shape.memory_mb,
            watchdog=shape.watchdog,
            keep_days=shape.keep_days,
        )

    def destroy(self, name: str) -> None:
        """Remove everything that `deploy` made, with all that lies in it; nothing there is no error."""
        stack = self._settled(name)
        if stack is None:
            self._say(f"there is no stack {name} in {self._account.region}")
            return
        self._remove(name, stack)
        self._say(f"removed the stack {name} and all it held")

    def logs(self, name: str, *, since_s: float, containing: str | None = None) -> Iterator[str]:
        """Yield what functions and builds have printed since the time `since_s`, line by line."""
        wanted = {} if containing is None else {"filterPattern": json.dumps(containing)}
        with explained(f"reading the logs of {name}"):
            pages = (
                self._account.client("logs")
                .get_paginator("filter_log_events")
                .paginate(logGroupName=log_group(name), startTime=int(since_s * 1000), **wanted)
            )
            for page in pages:
                for event in page["events"]:
                    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(event["timestamp"] / 1000))
                    yield f"{moment} {event['logStreamName'][-8:]} {event['message'].rstrip()}"

    def _check_account(self, shape: Shape) -> None:
        """Report quotas that are too small, before anything is made; raise PlatformRefused if no build can run."""
        with explained("asking for the account's concurrency"):
            limits = self._account.client("lambda").get_account_settings()["AccountLimit"]
        for notice in notices(limits["ConcurrentExecutions"], shape.memory_mb, self._account.region):
            self._say(notice)
        if not self._docker.runs() and self._builds() < 1:
            raise PlatformRefused(
                f"no docker runs here, and this account may run 0 builds at once in {self._account.region}; deploy "
                f"where docker runs, or {BUILDS.request(1, self._account.region)}"
            )

    def _builds(self) -> float:
        """Return the number of builds that may run at once; infinity where Service Quotas does not know."""
        quotas = self._account.client("service-quotas")
        with explained("asking how many builds may run"):
            try:
                found = quotas.get_service_quota(ServiceCode=BUILDS.service, QuotaCode=BUILDS.code)
            except quotas.exceptions.NoSuchResourceException:
                return float("inf")
        return float(found["Quota"]["Value"])

    def _find(self, name: str) -> Stack | None:
        """Return the stack; None if there is none (CloudFormation calls that a validation error)."""
        with explained(f"looking at the stack {name}"):
            try:
                found: Stack = self._stacks.describe_stacks(StackName=name)["Stacks"][0]
            except self._stacks.exceptions.ClientError as error:
                if "does not exist" in error.response["Error"].get("Message", ""):
                    return None
                raise
        return None if found["StackStatus"] == "DELETE_COMPLETE" else found

    def _settled(self, name: str) -> Stack | None:
        """Return the stack, when nothing happens to it any more."""
        stack = self._find(name)
        while stack is not None and _moves(stack):
            self._sleep(_POLL_S)
            stack = self._find(name)
        return stack

    def _change(self, change: Callable[..., object], name: str, text: str, *, image: str) -> Stack:
        """Create or update the stack and wait for the end."""
        began_s, before = time.time(), self._find(name)
        with explained(f"changing the stack {name}"):
            change(
                StackName=name,
                TemplateBody=text,
                Parameters=[{"ParameterKey": IMAGE_PARAMETER, "ParameterValue": image}, _secret(before)],
                Capabilities=["CAPABILITY_IAM"],
            )
        stack = self._settled(name)
        if stack is None or stack["StackStatus"] not in _GOOD:
            raise self._failure(name, began_s)
        return stack

    def _is(self, stack: Stack, text: str, image: str) -> bool:
        """Return True if the stack is already as it should be."""
        given = {item["ParameterKey"]: item["ParameterValue"] for item in stack.get("Parameters", ())}
        if stack["StackStatus"] not in _GOOD or given.get(IMAGE_PARAMETER) != image:
            return False
        with explained(f"reading the template of {stack['StackName']}"):
            body = self._stacks.get_template(StackName=stack["StackName"], TemplateStage="Original")["TemplateBody"]
        return bool((json.loads(body) if isinstance(body, str) else body) == json.loads(text))

    def _failure(self, name: str, began_s: float) -> PlatformError | PlatformRefused:
        """Return the error of the last change: of the first resource that failed, since the others only follow it."""
        with explained(f"asking why the stack {name} failed"):
            pages = self._stacks.get_paginator("describe_stack_events").paginate(StackName=name)
            events = [event for page in pages for event in page["StackEvents"]]
        reasons = [
            f"{event['LogicalResourceId']} ({event['ResourceType']}): {event.get('ResourceStatusReason', '')}"
            for event in reversed(events)
            if event["ResourceStatus"].endswith("_FAILED") and event["Timestamp"].timestamp() >= began_s - 60
        ]
        text = f"the stack {name} could not be changed: {reasons[0] if reasons else 'no reason was given'}"
        found = advice(text)
        return PlatformError(text) if found is None else PlatformRefused(f"{text}; {found}")

    def _remove(self, name: str, stack: Stack) -> None:
        self._empty(bucket_name(name, self._account))
        began_s = time.time()
        with explained(f"removing the stack {name}"):
            self._stacks.delete_stack(StackName=stack.get("StackId", name))
        left = self._settled(name)
        if left is not None:
            raise self._failure(name, began_s)

    def _empty(self, bucket: str) -> None:
        """Delete every object: a bucket that holds any cannot be removed."""
        objects = self._account.client("s3")
        with explained(f"emptying the bucket {bucket}"):
            try:
                for page in objects.get_paginator("list_objects_v2").paginate(Bucket=bucket):
                    keys = [{"Key": item["Key"]} for item in page.get("Contents", ())]
                    if keys:
                        objects.delete_objects(Bucket=bucket, Delete={"Objects": keys, "Quiet": True})
            except objects.exceptions.NoSuchBucket:
                return


def _secret(stack: Stack | None) -> Node:
    """Return the deployment's secret as a parameter: the one that it has, or a new one."""
    given = {item["ParameterKey"] for item in (stack or {}).get("Parameters", ())}
    if SECRET_PARAMETER in given:
        return {"ParameterKey": SECRET_PARAMETER, "UsePreviousValue": True}
    return {"ParameterKey": SECRET_PARAMETER, "ParameterValue": new_secret()}


def _moves(stack: Stack) -> bool:
    status = stack["StackStatus"]
    return bool(status.endswith("_IN_PROGRESS")) and status != "REVIEW_IN_PROGRESS"


def _build_project(name: str, stack: Stack) -> BuildProject:
    outputs = {item["OutputKey"]: item["OutputValue"] for item in stack["Outputs"]}
    return BuildProject(name=name, bucket=outputs["Bucket"], repository=outputs["Repository"])


_COMMAND = ("python", "-m", "awslambdaric", "funcpipe.platforms.entry_aws.handler")


def lambda_package(extra: Sequence[str] = (), base: str | None = None) -> Package:
    """Return the package of the image, on the image `base`; `extra` are requirements of the user's model."""
    return make_package(_COMMAND, ("boto3", "awslambdaric"), extra, base)


def ensure_image(
    account: Account,
    project: BuildProject,
    package: Package,
    *,
    say: Callable[[str], None],
    sleep: Callable[[float], None],
    docker: Docker,
) -> str:
    """The URI of the image of `package`, which is built only if the repository has none with its digest as tag."""
    image = f"{project.repository}:{package.digest}"
    if image_bytes(account, project, package.digest) is not None:
        say(f"the image {package.digest} is there")
    elif docker.runs():
        say(f"building the image {package.digest} with {docker.program}")
        _build_here(account, image, package, docker)
    else:
        say(f"building the image {package.digest} in the cloud (CodeBuild), since no docker runs here")
        _build_there(account, project, image, package, sleep)
    return image


def image_bytes(account: Account, project: BuildProject, tag: str) -> int | None:
    """Return the bytes that the repository keeps of the image with `tag`; None if it has none."""
    registry = account.client("ecr")
    name = project.repository.partition("/")[2]
    with explained(f"looking for the image {tag}"):
        try:
            found = registry.describe_images(repositoryName=name, imageIds=[{"imageTag": tag}])
        except registry.exceptions.ImageNotFoundException:
            return None
    return int(found["imageDetails"][0].get("imageSizeInBytes", 0))


def _build_here(account: Account, image: str, package: Package, docker: Docker) -> None:
    docker.build(package, image)
    with explained("logging in to the image repository"):
        token = account.client("ecr").get_authorization_token()["authorizationData"][0]["authorizationToken"]
    user, _, password = base64.b64decode(token).decode().partition(":")
    docker.login(image.partition("/")[0], user=user, password=password)
    docker.push(image)


def _build_there(
    account: Account, project: BuildProject, image: str, package: Package, sleep: Callable[[float], None]
) -> None:
    key = f"{SOURCES}/{package.digest}.zip"
    with explained("uploading what the image is made from"):
        account.client("s3").put_object(Bucket=project.bucket, Key=key, Body=package.archive())
    builder: Any = account.client("codebuild")
    with explained("building the image"):
        build = builder.start_build(
            projectName=project.name,
            sourceTypeOverride="S3",
            sourceLocationOverride=f"{project.bucket}/{key}",
            environmentVariablesOverride=[{"name": "IMAGE", "value": image, "type": "PLAINTEXT"}],
        )["build"]
        while build["buildStatus"] == "IN_PROGRESS":
            sleep(_POLL_S)
            build = builder.batch_get_builds(ids=[build["id"]])["builds"][0]
    if build["buildStatus"] != "SUCCEEDED" and image_bytes(account, project, package.digest) is None:
        raise _build_failed(account, project, build)


def _build_failed(account: Account, project: BuildProject, build: dict[str, Any]) -> PlatformError | PlatformRefused:
    """The error of a build that failed, with what it said last. (It does not matter if another one has succeeded.)"""
    stream = build.get("logs", {}).get("streamName")
    lines: list[str] = []
    if stream is not None:
        with explained("reading what the build said"):
            events = account.client("logs").get_log_events(
                logGroupName=log_group(project.name), logStreamName=stream, limit=30
            )["events"]
        lines = [event["message"].rstrip() for event in events]
    text = "\n".join([f"the build {build['id']} has {build['buildStatus'].lower()}:", *lines])
    found = advice(text)
    return PlatformError(text) if found is None else PlatformRefused(f"{text}\n{found}")
