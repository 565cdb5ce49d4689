"""What the roles of functions have asked an emulated account for, and what their policies grant them."""

import ast
import json
from collections.abc import Iterator
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import Any

from tests.cloud_emulation.aws import AwsCloud
from tests.cloud_emulation.lambda_runtime import ACCOUNT, REGION
from tests.cloud_emulation.recording_proxy import RecordingProxy, Request
from tests.contract.faulty_proxy import answering

BUCKET = "funcpipe-123456789012-us-east-1"
LOGS = "arn:aws:logs:us-east-1:123456789012:log-group:/funcpipe/funcpipe"
"""What moto says that the ARN of a log group is; CloudFormation says that `:*` follows."""

BY_LAMBDA = {
    ("logs:CreateLogStream", "/funcpipe/funcpipe:*"),
    ("logs:PutLogEvents", "/funcpipe/funcpipe:*"),
    ("s3:PutObject", f"{BUCKET}/aws/lambda/async/*"),
}
"""What Lambda itself does as the role of a function: it writes its logs, and records of events that have failed.

docs.aws.amazon.com/lambda/latest/dg/lambda-intro-execution-role.html and invocation-async-retain-records.html, 2026-11.
"""

Right = tuple[str, str]


class Cloud:
    """An account whose functions ask through proxies; `needed` are the rights that each role has needed so far."""

    def __init__(self, cloud: AwsCloud, stack: ExitStack) -> None:
        self.cloud = cloud
        self.proxies = [stack.enter_context(answering(RecordingProxy(url))) for url in (cloud.moto, cloud.endpoint)]
        self.objects_url, self.lambda_url = (proxy.endpoint for proxy in self.proxies)
        cloud.environment |= {"AWS_ENDPOINT_URL": self.objects_url, "AWS_ENDPOINT_URL_LAMBDA": self.lambda_url}

    def needed(self, role: str) -> set[Right]:
        return {
            right
            for proxy in self.proxies
            for request in list(proxy.seen)
            if f"-{role}-" in request.who
            for right in rights_of(request)
        }

    def role_name(self, role: str) -> str:
        roles = self.cloud.client("iam").list_roles()["Roles"]
        (name,) = [found["RoleName"] for found in roles if f"-{role}-" in found["RoleName"]]
        return str(name)

    def policy(self, role: str) -> dict[str, Any]:
        iam, name = self.cloud.client("iam"), self.role_name(role)
        (policy,) = iam.list_role_policies(RoleName=name)["PolicyNames"]
        text = iam.get_role_policy(RoleName=name, PolicyName=policy)["PolicyDocument"]  # of moto's, not JSON
        document: dict[str, Any] = ast.literal_eval(text.replace(LOGS, f"{LOGS}:*"))
        return document


def rights_of(request: Request) -> Iterator[Right]:
    """The actions that a request to S3, Lambda or CloudWatch Logs is, and what each is done to."""
    parts = request.path.strip("/").split("/", 1)
    if request.path.startswith("/2015-03-31/functions/"):
        name, what = request.path.split("/")[3:5]
        assert (request.method, what) == ("POST", "invocations")
        yield "lambda:InvokeFunction", f"arn:aws:lambda:{REGION}:{ACCOUNT}:function:{name}"
    elif request.body.startswith(b"Action=GetCallerIdentity&"):
        return  # anybody may
    elif parts == [""]:
        group = json.loads(request.body)["logGroupName"]
        yield "logs:FilterLogEvents", f"arn:aws:logs:{REGION}:{ACCOUNT}:log-group:{group}:*"
    elif "delete" in request.options:
        yield from (("s3:DeleteObject", f"arn:aws:s3:::{parts[0]}/{key}") for key in request.deleted_keys())
    elif len(parts) == 1:
        assert request.method == "GET"
        yield "s3:ListBucket", f"arn:aws:s3:::{parts[0]}"
    else:
        action = {"GET": "GetObject", "PUT": "PutObject", "DELETE": "DeleteObject"}[request.method]
        yield f"s3:{action}", f"arn:aws:s3:::{request.path.strip('/')}"
        if request.copied:
            yield "s3:GetObject", f"arn:aws:s3:::{request.copied.strip('/')}"


def granted(policy: dict[str, Any]) -> set[Right]:
    """Each action with each resource that the policy allows it for."""
    return {
        (action, place)
        for statement in policy["Statement"]
        for action in statement["Action"]
        for place in ([statement["Resource"]] if isinstance(statement["Resource"], str) else statement["Resource"])
    }


def refused(policy: dict[str, Any], needed: set[Right]) -> set[Right]:
    from moto.iam.access_control import IAMPolicy, PermissionResult

    document = IAMPolicy(json.dumps(policy))
    return {
        (action, place)
        for action, place in needed
        if document.is_action_permitted(action, place) is not PermissionResult.PERMITTED
    }


def unused(policy: dict[str, Any], needed: set[Right]) -> set[Right]:
    return {
        (action, pattern)
        for action, pattern in granted(policy)
        if not any(action == used and fnmatchcase(place, pattern) for used, place in needed)
        and not any(action == own and pattern.endswith(place) for own, place in BY_LAMBDA)
    }


def table(policy: dict[str, Any], needed: set[Right]) -> Iterator[str]:
    """A line for each right that is granted: how many different requests have needed it."""
    for action, pattern in sorted(granted(policy)):
        count = sum(action == used and fnmatchcase(place, pattern) for used, place in needed)
        own = any(action == done and pattern.endswith(place) for done, place in BY_LAMBDA)
        yield f"{action:24}{pattern:76}{'by Lambda itself' if own else count}"
    yield f"refused: {sorted(refused(policy, needed)) or 'nothing'}"
