"""The command line of deployments and logs."""

import argparse
from typing import Any

from funcpipe.cli.numbers import positive, whole
from funcpipe.cli.options import add_verb
from funcpipe.core.settings import KEEP_DAYS, LEAST_KEEP_DAYS

SKY = "sky"
LEVELS = ("debug", "info", "warning", "error")


def add_deploy(verbs: Any) -> None:
    """The verb `deploy`."""
    verb = add_verb(
        verbs,
        "deploy",
        "set up storage, role, functions, or rent machines",
        "funcpipe deploy aws --region eu-central-1 --plan plan.json\n"
        "  funcpipe deploy sky --provision ways.json --run 'funcpipe train …' --template-only sky.yaml",
        module="deployments",
    )
    verb.description = (
        "Set up what runs on a cloud need: storage, role, image, a function of each size; or write what rents machines."
    )
    _add_deployment(verb, "aws", "aliyun", SKY)
    which = verb.add_mutually_exclusive_group()
    which.add_argument("--plan", metavar="FILE", help="make functions of the sizes of this plan")
    which.add_argument("--sizes", metavar="SIZE,SIZE", help="make functions of these sizes")
    _add_image(verb)
    verb.add_argument(
        "--data-bucket",
        metavar="NAME[/PREFIX]",
        action="append",
        default=[],
        help="let functions read the objects of a bucket, or those below a prefix, and nothing else; can be repeated",
    )
    verb.add_argument("--spec", metavar="FILE", help="aliyun: the platform specification that sizes come from")
    verb.add_argument(
        "--keep-days",
        metavar="DAYS",
        type=whole(LEAST_KEEP_DAYS),
        default=KEEP_DAYS,
        help="after how many days objects of runs that do not go on expire (default: %(default)s)",
    )
    verb.add_argument(
        "--no-watchdog",
        action="store_true",
        help="leave out the function that restarts workers of detached runs when no client does",
    )
    verb.add_argument(
        "--template-only",
        metavar="FILE",
        help="write what would be made, for CloudFormation or Serverless Devs; sky: write the task file for SkyPilot",
    )
    verb.add_argument(
        "--print-deployer-policy",
        action="store_true",
        help="aws: print the rights that deploying, training and destroying need, as a policy of IAM",
    )
    verb.add_argument(
        "--account", metavar="NUMBER", help="aws: whose resources the policy is for (default: the user's)"
    )
    sky = verb.add_argument_group("sky")
    sky.add_argument("--provision", metavar="FILE", help="the ways that `funcpipe provision --json` has printed")
    sky.add_argument("--way", metavar="WAY", help="rent the machines of this way (default: the recommended one)")
    sky.add_argument("--market", metavar="NAME|FILE", help="the market of the machines (default: the file's)")
    sky.add_argument(
        "--run", dest="command", metavar="COMMAND", help="what runs on the head node, with --platform ray://auto"
    )


def _add_image(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--requirements", metavar="FILE", help="what the model imports, for pip, besides torch")
    verb.add_argument(
        "--base-image",
        metavar="IMAGE",
        help="what the functions' image begins with, such as python:3.11-slim@sha256:… (default: that tag)",
    )
    verb.add_argument("--repository", metavar="NAME", help="aliyun: the repository that the image goes to")
    verb.add_argument(
        "--registry-instance",
        metavar="ID",
        help="aliyun: the instance of a repository of the Enterprise Edition, cri-…",
    )


def add_destroy(verbs: Any) -> None:
    """The verb `destroy`."""
    verb = add_verb(
        verbs,
        "destroy",
        "remove what deploy made, with all that lies in it",
        "funcpipe destroy aws --region eu-central-1",
        module="deployments",
    )
    _add_deployment(verb, "aws", "aliyun")


def add_logs(verbs: Any) -> None:
    """The verb `logs`."""
    verb = add_verb(
        verbs,
        "logs",
        "show what a run's functions logged, merged in time",
        "funcpipe logs run-20261122-100000-1a2b3c4d --level warning",
        module="deployments",
    )
    verb.add_argument(
        "about",
        metavar="RUN",
        help="the run; or aws or aliyun, for what all functions and builds of a deployment there have written lately",
    )
    where = verb.add_mutually_exclusive_group()
    where.add_argument("--platform", metavar="URL", help="the deployment that it runs on (default: this machine)")
    where.add_argument("--storage", metavar="URL", help="the storage where it says what it runs on")
    verb.add_argument("--worker", metavar="NAME", help="only lines of this worker, such as s0.r1")
    verb.add_argument("--level", choices=LEVELS, help="only lines of this level or above; what is printed is info")
    lately = verb.add_argument_group("of aws or aliyun")
    _add_name(lately)
    lately.add_argument("--minutes", type=positive, default=60.0, help="of the last so many (default: %(default)g)")
    lately.add_argument("--containing", metavar="TEXT", help="only lines with this text")


def _add_deployment(verb: argparse.ArgumentParser, *clouds: str) -> None:
    verb.add_argument("cloud", choices=clouds, help="which cloud")
    _add_name(verb)


def _add_name(verb: argparse._ActionsContainer) -> None:
    verb.add_argument("--name", default="funcpipe", help="the deployment's name (default: %(default)s)")
    verb.add_argument("--region", help="the region (default: the environment's)")
