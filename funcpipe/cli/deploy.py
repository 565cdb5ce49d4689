"""The verbs deploy and destroy: what a cloud needs for runs, and the task file that SkyPilot rents machines by."""

import dataclasses
import importlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from funcpipe import show
from funcpipe.cli.files import write_file
from funcpipe.cli.options import Choice, argument, group, named, option, setting, whole
from funcpipe.cli.provision import chosen_way
from funcpipe.cli.run import DEPLOYMENT
from funcpipe.cli.verbs import Options, verb
from funcpipe.core import Plan, read
from funcpipe.core.distribution import needed_from
from funcpipe.core.process import say, write_out
from funcpipe.core.settings import KEEP_DAYS, LEAST_KEEP_DAYS
from funcpipe.errors import InputError
from funcpipe.platforms.catalog import load_market, load_spec, with_gpu_instances

_SKY = "sky"


class Cloud(ABC):
    """A cloud that functions are deployed on. Its platform has modules for its account and for deployments."""

    name: str
    spec: str

    def deployer(self, options: Options) -> Any:
        """Return what sets up, removes and reads the logs of deployments."""
        modules = [
            importlib.import_module(f"funcpipe.platforms.{self.name}.{part}") for part in ("account", "deployment")
        ]
        return modules[1].Deployer(modules[0].Account(region=options.region), say=say)

    def logs(self, options: Options, since_s: float) -> Iterator[str]:
        """The lines that functions and builds have written since a time."""
        yield from self.deployer(options).logs(options.name, since_s=since_s, containing=options.containing)

    @abstractmethod
    def package(self, options: Options) -> Any:
        """The contents of the image."""

    @abstractmethod
    def shape(self, options: Options) -> Any:
        """The functions and their surroundings. Raises InputError."""

    @abstractmethod
    def template(self, options: Options) -> str:
        """The deployment's form of record."""

    def deployer_policy(self, options: Options) -> str:
        """The rights that deploying needs, as JSON; raises InputError where no policy is kept."""
        raise InputError(f"--print-deployer-policy is for aws only; docs/{self.name}.md says what is needed here")


class Aws(Cloud):
    """AWS Lambda, S3, CloudFormation."""

    name, spec = "aws", "aws-lambda"

    def package(self, options: Options) -> Any:
        """The contents of the image."""
        from funcpipe.platforms.aws.deployment import lambda_package
        from funcpipe.platforms.shared.package import read_requirements

        return lambda_package(read_requirements(options.requirements), options.base_image)

    def shape(self, options: Options) -> Any:
        """The functions and their surroundings. Raises InputError."""
        from funcpipe.platforms.aws.resources import ARCHITECTURE, check_processors
        from funcpipe.platforms.aws.template import Shape

        sizes = _sizes(options)
        if options.plan:
            check_processors(read(Plan, options.plan).platform, ARCHITECTURE, functions="deploy makes functions with")
        for size in sizes:
            if not re.fullmatch(r"\d+(MB)?", size, re.ASCII):
                raise InputError(f"a size on AWS is its memory, such as 2048MB, got {size!r}")
        memory = tuple(sorted({int(size.removesuffix("MB")) for size in sizes}))
        return Shape(memory_mb=memory, **_shared(options))

    def template(self, options: Options) -> str:
        """The template of CloudFormation."""
        from funcpipe.platforms.aws.template import template_text

        return template_text(self.shape(options))

    def deployer_policy(self, options: Options) -> str:
        """A policy of IAM."""
        from funcpipe.platforms.aws.account import Account
        from funcpipe.platforms.aws.resources import deployer_policy

        where = Account(region=options.region)
        made = deployer_policy(options.name, region=where.region, account=options.account, partition=where.partition)
        return json.dumps(made, indent=1)


class Aliyun(Cloud):
    """Alibaba Function Compute and OSS."""

    name, spec = "aliyun", "aliyun-fc"

    def package(self, options: Options) -> Any:
        """The contents of the image."""
        from funcpipe.platforms.aliyun.template import container_package
        from funcpipe.platforms.shared.package import read_requirements

        cuda = self.shape(options).has_gpus
        return container_package(read_requirements(options.requirements), options.base_image, cuda=cuda)

    def shape(self, options: Options) -> Any:
        """The functions and their surroundings. Raises InputError."""
        from funcpipe.platforms.aliyun.account import check_registry
        from funcpipe.platforms.aliyun.template import shape_of

        if options.repository is None:
            raise InputError(
                "say with --repository where the image goes: the public address that Container Registry shows of a "
                "repository in the functions' region, such as crpi-ID.REGION.personal.cr.aliyuncs.com/YOU/NAME"
            )
        if options.region:
            check_registry(options.repository, options.region, options.registry_instance)
        return shape_of(
            with_gpu_instances(load_spec(options.spec or self.spec)),
            sizes=_sizes(options),
            repository=options.repository,
            registry_instance=options.registry_instance,
            **_shared(options),
        )

    def template(self, options: Options) -> str:
        """The template of Serverless Devs; the account's number comes from the environment when it is used."""
        from funcpipe.platforms.aliyun.account import bucket_name, role_name, storage_url
        from funcpipe.platforms.aliyun.template import tool_template

        shape, package = self.shape(options), self.package(options)
        account = "${env('ALIBABA_CLOUD_ACCOUNT_ID')}"
        region = options.region or "${env('ALIBABA_CLOUD_REGION')}"
        role = f"acs:ram::{account}:role/{role_name(options.name, region)}"
        storage = storage_url(bucket_name(options.name, account, region), region, internal=True)
        image = f"{shape.repository}:{package.digest}"
        return tool_template(shape, region=region, image=image, role=role, storage=storage)


CLOUDS: dict[str, type[Cloud]] = {"aws": Aws, "aliyun": Aliyun}


def _shared(options: Options) -> dict[str, Any]:
    """What deployments on all clouds take."""
    from funcpipe.platforms.shared.deployment import data_bucket

    return {
        "name": options.name,
        "watchdog": options.watchdog,
        "data": tuple(map(data_bucket, options.data_bucket)),
        "keep_days": options.keep_days,
    }


_IMAGE = [
    option(
        "--requirements FILE", "what the model imports, for pip, besides torch", key="platform.requirements", reads=True
    ),
    setting(
        "platform.base-image IMAGE",
        "what the functions' image begins with, such as python:3.11-slim@sha256:… (default: that tag)",
    ),
    option("--repository NAME", "aliyun: the repository that the image goes to", key="platform.repository"),
    setting("platform.registry-instance ID", "aliyun: the instance of a repository of the Enterprise Edition, cri-…"),
]

_FUNCTIONS = [
    option(
        "--plan FILE",
        "make functions of the sizes of this plan; sky: the ways that `funcpipe provision compare --json` has printed",
        one_of="sizes",
        key="plan.file",
        reads=True,
    ),
    option("--sizes SIZE,SIZE", "make functions of these sizes", one_of="sizes"),
    *_IMAGE,
    option(
        "--data-bucket NAME[/PREFIX] ...",
        "let functions read the objects of a bucket, or those below a prefix, and nothing else; can be repeated",
    ),
    setting("platform.spec FILE", "aliyun: the platform specification that sizes come from", reads=True),
    setting(
        "platform.keep-days DAYS",
        "after how many days objects of runs that do not go on expire",
        whole(LEAST_KEEP_DAYS),
        KEEP_DAYS,
    ),
    setting(
        "platform.watchdog",
        "with the function that restarts workers of detached runs when no client does",
        default=True,
    ),
    option(
        "--template-only FILE",
        "write what would be made, for CloudFormation or Serverless Devs; sky: write the task file for SkyPilot",
        writes="",
    ),
    option(
        "--print-deployer-policy",
        "aws: print the rights that deploying, training and destroying need, as a policy of IAM",
    ),
    setting("platform.account NUMBER", "aws: whose resources the policy is for (default: the user's)"),
]

_MACHINES = group(
    "sky",
    setting("plan.way NAME", "rent the machines of this way (default: the recommended one)"),
    setting("platform.market NAME|FILE", "the market of the machines (default: the file's)"),
    option("--command COMMAND", "what runs on the head node, with --platform ray://auto", to="on_head"),
)


@verb(
    "funcpipe deploy aws --region eu-central-1 --plan plan.json\n"
    "  funcpipe deploy sky --plan ways.json --command 'funcpipe train …' --template-only sky.yaml",
    argument("{aws,aliyun,sky}", "which cloud", "cloud", Choice(("aws", "aliyun", _SKY)), key="platform.cloud"),
    DEPLOYMENT,
    _FUNCTIONS,
    _MACHINES,
    about="Set up what runs on a cloud need: storage, role, image, a function of each size; or write what rents "
    "machines.",
)
def deploy(options: Options) -> None:
    """Set up a deployment, write its template, or print the rights that it needs."""
    if options.cloud == _SKY:
        _write_sky_file(options)
        return
    if options.on_head is not None:
        raise InputError("--command is for machines: funcpipe deploy sky")
    cloud = cloud_of(options.cloud)
    if options.print_deployer_policy:
        write_out(cloud.deployer_policy(options))
        return
    if options.template_only:
        text = cloud.template(options)
        write_file(lambda path: Path(path).write_text(text, encoding="utf-8"), options.template_only)
        return
    package = cloud.package(options)
    found = cloud.deployer(options).deploy(cloud.shape(options), package)
    prices = load_spec(f"{cloud.spec}?region={found.region}")
    fields = {**dataclasses.asdict(found), "keeping": found.keeping_text(prices)}
    lines = [f"{name}: {value if isinstance(value, str) else json.dumps(value)}" for name, value in fields.items()]
    show.show(options.json, show.as_json(fields), lambda: "\n".join(lines))


@verb(
    "funcpipe destroy aws --region eu-central-1",
    argument("{aws,aliyun}", "which cloud", "cloud", Choice(("aws", "aliyun")), key="platform.cloud"),
    DEPLOYMENT,
)
def destroy(options: Options) -> None:
    """Remove a deployment with all it holds."""
    cloud_of(options.cloud).deployer(options).destroy(options.name)


def cloud_of(name: str) -> Cloud:
    """The cloud of this name; raises MissingExtra where its library is not installed."""
    with needed_from(name):
        importlib.import_module(f"funcpipe.platforms.{name}.account")
    return CLOUDS[name]()


def _sizes(options: Options) -> tuple[str, ...]:
    """The sizes that were named, or those of the plan."""
    if options.plan:
        return tuple(dict.fromkeys(stage.size for stage in read(Plan, options.plan).stages))
    if not options.sizes:
        raise InputError("say which functions to make: --sizes 2048MB,4096MB, or --plan plan.json")
    return tuple(options.sizes.split(","))


def _write_sky_file(options: Options) -> None:
    """Write the task file of the way that was recommended, or named; raises InputError."""
    from funcpipe.platforms.ray.sky_task import SkyJob, sky_text
    from funcpipe.platforms.shared.package import read_requirements

    asked = ("plan", "template_only", "keep_days", "requirements")
    other = [one for one in _FUNCTIONS if one.name not in asked and one.name in options.given]
    if other:
        raise InputError(f"{named(other[0])} is for functions of a cloud, and deploy sky rents machines")
    if options.plan is None or options.on_head is None or options.template_only is None:
        raise InputError(
            "deploy sky writes a task file: say which machines with --plan ways.json (provision compare --json), "
            "what runs on them with --command 'funcpipe train …', and where to write it with --template-only sky.yaml"
        )
    chosen = chosen_way(options.plan, options.way)
    assert chosen.way is not None, "it is of a provision"
    found = load_market(options.market or chosen.market)
    job = SkyJob(command=options.on_head, name=options.name, requirements=read_requirements(options.requirements))
    text = sky_text(chosen.way, found if options.region is None else replace(found, region=options.region), job)
    write_file(lambda path: Path(path).write_text(text, encoding="utf-8"), options.template_only)
