"""What can be said of deployments on the command line."""

import argparse
from typing import Any

from funcpipe.cli.options import add_verb


def add_deploy(verbs: Any) -> None:
    """The verb `deploy`."""
    verb = add_verb(
        verbs,
        "deploy",
        "set up what runs on a cloud need: storage, role, image, a function of each size",
        "funcpipe deploy aws --region eu-central-1 --plan plan.json",
        module="deployments",
    )
    _add_deployment(verb)
    which = verb.add_mutually_exclusive_group()
    which.add_argument("--plan", metavar="FILE", help="make functions of the sizes of this plan")
    which.add_argument("--sizes", metavar="SIZE,SIZE", help="make functions of these sizes")
    verb.add_argument("--requirements", metavar="FILE", help="what the model imports, for pip, besides torch")
    verb.add_argument("--repository", metavar="NAME", help="aliyun: the repository that the image is pushed to")
    verb.add_argument("--spec", metavar="FILE", help="aliyun: the platform specification that sizes come from")
    verb.add_argument(
        "--template-only", metavar="FILE", help="write what would be made, for CloudFormation or Serverless Devs"
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
    _add_deployment(verb)


def add_logs(verbs: Any) -> None:
    """The verb `logs`."""
    verb = add_verb(
        verbs,
        "logs",
        "show what functions on a cloud said",
        "funcpipe logs aws --region eu-central-1 --minutes 15 --containing Traceback",
        module="deployments",
    )
    _add_deployment(verb)
    verb.add_argument("--minutes", type=float, default=60.0, help="of the last so many minutes (default: %(default)g)")
    verb.add_argument("--containing", metavar="TEXT", help="only lines with this text")


def _add_deployment(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("cloud", choices=["aws", "aliyun"], help="which cloud")
    verb.add_argument("--name", default="funcpipe", help="the deployment's name (default: %(default)s)")
    verb.add_argument("--region", help="the region (default: the environment's)")
