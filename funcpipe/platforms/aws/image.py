"""The image of a deployment's functions: built by docker here, or by CodeBuild in the cloud where there is none."""

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from funcpipe.errors import PlatformError, PlatformRefused
from funcpipe.platforms.aws.account import Account, advice, explained
from funcpipe.platforms.aws.template import SOURCES, log_group
from funcpipe.platforms.shared.docker import Docker
from funcpipe.platforms.shared.package import Package, make_package

_COMMAND = ("python", "-m", "awslambdaric", "funcpipe.platforms.entry.aws_lambda.handler")
_POLL_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildProject:
    """The place of an image: outputs of a deployment's stack, whose `name` is also the build project's."""

    name: str
    bucket: str
    repository: str


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
