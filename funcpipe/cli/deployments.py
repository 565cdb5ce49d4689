"""The verbs that set up and remove deployments, and the one that shows logs."""

import argparse
import dataclasses
import importlib
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from funcpipe import show as render
from funcpipe.cli.deploy_arguments import SKY
from funcpipe.cli.files import write_file
from funcpipe.cli.log_lines import is_wanted, run_lines
from funcpipe.cli.sky_file import write_sky_file
from funcpipe.core import Plan, read
from funcpipe.core.distribution import needed_from
from funcpipe.core.process import say, write_out
from funcpipe.errors import InputError
from funcpipe.platforms.catalog import load_spec
from funcpipe.platforms.shared.data_buckets import data_bucket
from funcpipe.platforms.shared.package import read_requirements


class Cloud(Protocol):
    """The operations of a cloud that the verbs need; `spec` is its specification."""

    spec: str

    def template(self, options: argparse.Namespace) -> str:
        """The deployment's form of record."""

    def deployer_policy(self, options: argparse.Namespace) -> str:
        """The rights that deploying needs, as JSON."""

    def deploy(self, options: argparse.Namespace) -> Any:
        """Create or update it; return what exists, a dataclass with `keeping_text`."""

    def destroy(self, options: argparse.Namespace) -> None:
        """Remove it."""

    def logs(self, options: argparse.Namespace, since_s: float) -> Iterator[str]:
        """The lines that functions and builds have written since a time."""


class Aws:
    """AWS Lambda, S3, CloudFormation."""

    spec = "aws-lambda"

    def template(self, options: argparse.Namespace) -> str:
        """The template of CloudFormation."""
        from funcpipe.platforms.aws.template import template_text

        return template_text(self._shape(options))

    def deployer_policy(self, options: argparse.Namespace) -> str:
        """A policy of IAM."""
        from funcpipe.platforms.aws.account import Account
        from funcpipe.platforms.aws.deployer_policy import deployer_policy

        where = Account(region=options.region)
        made = deployer_policy(options.name, region=where.region, account=options.account, partition=where.partition)
        return json.dumps(made, indent=1)

    def deploy(self, options: argparse.Namespace) -> Any:
        """Create or update the stack."""
        from funcpipe.platforms.aws.image import lambda_package

        package = lambda_package(read_requirements(options.requirements), options.base_image)
        return self._deployer(options).deploy(self._shape(options), package)

    def destroy(self, options: argparse.Namespace) -> None:
        """Remove the stack."""
        self._deployer(options).destroy(options.name)

    def logs(self, options: argparse.Namespace, since_s: float) -> Iterator[str]:
        """The lines of the log group."""
        yield from self._deployer(options).logs(options.name, since_s=since_s, containing=options.containing)

    def _deployer(self, options: argparse.Namespace) -> Any:
        from funcpipe.platforms.aws.account import Account
        from funcpipe.platforms.aws.deployment import Deployer

        return Deployer(Account(region=options.region), say=say)

    def _shape(self, options: argparse.Namespace) -> Any:
        from funcpipe.platforms.aws.resources import ARCHITECTURE, check_processors
        from funcpipe.platforms.aws.template import Shape

        sizes = _sizes(options)
        if options.plan:
            check_processors(read(Plan, options.plan).platform, ARCHITECTURE, functions="deploy makes functions with")
        for size in sizes:
            if not re.fullmatch(r"\d+(MB)?", size, re.ASCII):
                raise InputError(f"a size on AWS is its memory, such as 2048MB, got {size!r}")
        memory = tuple(sorted({int(size.removesuffix("MB")) for size in sizes}))
        data = tuple(map(data_bucket, options.data_bucket))
        return Shape(
            name=options.name,
            memory_mb=memory,
            watchdog=not options.no_watchdog,
            data=data,
            keep_days=options.keep_days,
        )


class Aliyun:
    """Alibaba Function Compute and OSS."""

    spec = "aliyun-fc"

    def template(self, options: argparse.Namespace) -> str:
        """The template of Serverless Devs; the account's number comes from the environment when it is used."""
        from funcpipe.platforms.aliyun.names import bucket_name, role_name, storage_url
        from funcpipe.platforms.aliyun.template import container_package, tool_template

        shape = self._shape(options)
        package = container_package(read_requirements(options.requirements), options.base_image)
        account = "${env('ALIBABA_CLOUD_ACCOUNT_ID')}"
        region = options.region or "${env('ALIBABA_CLOUD_REGION')}"
        role = f"acs:ram::{account}:role/{role_name(options.name, region)}"
        storage = storage_url(bucket_name(options.name, account, region), region, internal=True)
        image = f"{shape.repository}:{package.digest}"
        return tool_template(shape, region=region, image=image, role=role, storage=storage)

    def deployer_policy(self, options: argparse.Namespace) -> str:
        """Raise InputError: no policy is kept."""
        raise InputError("--print-deployer-policy is for aws only; docs/aliyun.md says what is needed here")

    def deploy(self, options: argparse.Namespace) -> Any:
        """Create or update bucket, log project, role, image and functions."""
        from funcpipe.platforms.aliyun.template import container_package

        package = container_package(read_requirements(options.requirements), options.base_image)
        return self._deployer(options).deploy(self._shape(options), package)

    def destroy(self, options: argparse.Namespace) -> None:
        """Remove them."""
        self._deployer(options).destroy(options.name)

    def logs(self, options: argparse.Namespace, since_s: float) -> Iterator[str]:
        """The states of tasks."""
        yield from self._deployer(options).logs(options.name, since_s=since_s, containing=options.containing)

    def _deployer(self, options: argparse.Namespace) -> Any:
        from funcpipe.platforms.aliyun.account import Account
        from funcpipe.platforms.aliyun.deployment import Deployer

        return Deployer(Account(region=options.region), say=say)

    def _shape(self, options: argparse.Namespace) -> Any:
        from funcpipe.platforms.aliyun.names import check_registry
        from funcpipe.platforms.aliyun.template import shape_of

        if options.repository is None:
            raise InputError(
                "say with --repository where the image goes: the public address that Container Registry shows of a "
                "repository in the functions' region, such as crpi-ID.REGION.personal.cr.aliyuncs.com/YOU/NAME"
            )
        if options.region:
            check_registry(options.repository, options.region, options.registry_instance)
        spec = load_spec(options.spec or self.spec)
        sizes, watchdog = _sizes(options), not options.no_watchdog
        data = tuple(map(data_bucket, options.data_bucket))
        return shape_of(
            spec,
            name=options.name,
            sizes=sizes,
            repository=options.repository,
            watchdog=watchdog,
            data=data,
            keep_days=options.keep_days,
            registry_instance=options.registry_instance,
        )


CLOUDS: dict[str, Callable[[], Cloud]] = {"aws": Aws, "aliyun": Aliyun}


def deploy(options: argparse.Namespace) -> None:
    """Set up a deployment, write its template, or print the rights that it needs."""
    if options.cloud == SKY:
        write_sky_file(options)
        return
    if options.provision is not None or options.command is not None:
        raise InputError("--provision and --run are for machines: funcpipe deploy sky")
    cloud = _cloud(options)
    if options.print_deployer_policy:
        write_out(cloud.deployer_policy(options))
        return
    if options.template_only:
        text = cloud.template(options)
        write_file(lambda path: Path(path).write_text(text, encoding="utf-8"), options.template_only)
        return
    found = cloud.deploy(options)
    prices = load_spec(f"{cloud.spec}?region={found.region}")
    fields = {**dataclasses.asdict(found), "keeping": found.keeping_text(prices)}
    lines = [f"{name}: {value if isinstance(value, str) else json.dumps(value)}" for name, value in fields.items()]
    render.show(options.json, render.as_json(fields), lambda console: console.print("\n".join(lines)))


def destroy(options: argparse.Namespace) -> None:
    """Remove a deployment with all it holds."""
    _cloud(options).destroy(options)


def logs(options: argparse.Namespace) -> None:
    """Print the log of a run, or all that a deployment has written lately."""
    if options.about in CLOUDS:
        options.cloud = options.about
        for text in _cloud(options).logs(options, time.time() - 60 * options.minutes):
            if not write_out(json.dumps(text) if options.json else text):
                break
        return
    for line in run_lines(options.about, platform=options.platform, storage=options.storage):
        if is_wanted(line, worker=options.worker, level=options.level):
            text = json.dumps(dataclasses.asdict(line)) if options.json else str(line)
            if not write_out(text):
                break


def _cloud(options: argparse.Namespace) -> Cloud:
    with needed_from(options.cloud):
        importlib.import_module(f"funcpipe.platforms.{options.cloud}.account")
    return CLOUDS[options.cloud]()


def _sizes(options: argparse.Namespace) -> tuple[str, ...]:
    """The sizes that were named, or those of the plan."""
    if options.plan:
        return tuple(dict.fromkeys(stage.size for stage in read(Plan, options.plan).stages))
    if not options.sizes:
        raise InputError("say which functions to make: --sizes 2048MB,4096MB, or --plan plan.json")
    return tuple(options.sizes.split(","))
