"""The roles of functions have the rights that they need, by what functions have asked for, and no others."""

import ast
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import pytest
from moto.iam.access_control import IAMPolicy, PermissionResult

from funcpipe.client.control import status
from funcpipe.client.launch import launch, launch_detached
from funcpipe.client.prepare import PreparedRun, prepare
from funcpipe.client.session import session_on
from funcpipe.client.site import Site
from funcpipe.core import FaultTolerance, Outcome, RunSettings
from funcpipe.platforms.aws.account import Account
from funcpipe.platforms.aws.functions import AwsPlatform
from funcpipe.platforms.base import Storage
from funcpipe.platforms.catalog import load_spec, open_storage
from funcpipe.platforms.shared.key_wrap import SECRET
from tests.cloud_emulation.aws import AwsCloud
from tests.cloud_emulation.lambda_runtime import ACCOUNT, REGION
from tests.cloud_emulation.recording_proxy import RecordingProxy, Request
from tests.contract.faulty_proxy import answering
from tests.e2e import small
from tests.platforms.aws.conftest import EVERY_S, OFTEN, STORAGE
from tests.platforms.aws.test_functions import spec
from tests.platforms.hand_over import SHORT, assert_handed_over, long_job

pytestmark = pytest.mark.slow

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


def granted(policy: dict[str, Any]) -> set[Right]:
    """Each action with each resource that the policy allows it for."""
    return {
        (action, place)
        for statement in policy["Statement"]
        for action in statement["Action"]
        for place in ([statement["Resource"]] if isinstance(statement["Resource"], str) else statement["Resource"])
    }


def refused(policy: dict[str, Any], needed: set[Right]) -> set[Right]:
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


def stop_one(cloud: Cloud, role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a function that finds the run deleted, or cannot record what it has started: it invokes one, and stops it."""
    function = cloud.cloud.client("lambda").get_function_configuration(FunctionName="funcpipe-1024")
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", cloud.role_name(role))
        patch.setenv(SECRET, function["Environment"]["Variables"][SECRET])
        patch.setenv("AWS_ENDPOINT_URL", cloud.objects_url)
        patch.setenv("AWS_ENDPOINT_URL_LAMBDA", cloud.lambda_url)
        platform = AwsPlatform(load_spec("aws-lambda"), Account(region=REGION), deployment="funcpipe", polling=OFTEN)
        worker = spec(open_storage(STORAGE), small.failing_loss)
        failed = platform.invoke(worker)
        while platform.status(failed).reason == "":
            time.sleep(EVERY_S)
        platform.stop(platform.invoke(spec(open_storage(STORAGE), small.sleeping_loss)))


def test_functions_may_do_what_they_do_and_nothing_else(
    deployed: Account, storage: Storage, cloud: AwsCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        seen = Cloud(cloud, stack)
        job = long_job(small.plan(2, 1))
        platform = AwsPlatform(replace(load_spec("aws-lambda"), cold_start_s=1.0), deployed, polling=OFTEN)
        assert_handed_over(launch(prepare(job, session_on(Site(platform, storage, STORAGE)), faults=SHORT)), job)
        stop_one(seen, "FunctionRole", monkeypatch)
        needed, policy = seen.needed("FunctionRole"), seen.policy("FunctionRole")
        storage.delete_many(storage.list(""))
    print("functions:", *table(policy, needed), sep="\n")
    assert refused(policy, needed) == set()
    assert unused(policy, needed) == set()


def test_a_watchdog_may_do_what_it_does_and_nothing_else(
    deployed: Account, storage: Storage, cloud: AwsCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, faults = long_job(small.plan(1, 1)), FaultTolerance(heartbeat_s=0.5, lease_s=1.0, checkpoint_steps=1)
    platform = AwsPlatform(replace(load_spec("aws-lambda"), cold_start_s=1.0), deployed, polling=OFTEN)

    def prepared(settings: RunSettings) -> PreparedRun:
        return prepare(job, session_on(Site(platform, storage, STORAGE)), faults=faults, settings=settings)

    with ExitStack() as stack:
        seen = Cloud(cloud, stack)
        launch_detached(prepared(RunSettings(name="left")))
        while not [worker for worker in status(storage, "left").workers if worker.step > 2]:
            time.sleep(EVERY_S)
        (worker,) = [environment for environment in cloud.environments if environment.busy]
        worker.close()
        time.sleep(3 * faults.heartbeat_s)
        cloud.pass_a_minute("funcpipe")
        while [worker for worker in status(storage, "left").workers if worker.outcome is not Outcome.FINISHED]:
            time.sleep(EVERY_S)
        cloud.pass_a_minute("funcpipe")  # it takes the mark away
        while storage.list("_watch/"):
            time.sleep(EVERY_S)
        launch(prepared(RunSettings(resume="left")))
        stop_one(seen, "WatchdogRole", monkeypatch)
        needed, policy = seen.needed("WatchdogRole"), seen.policy("WatchdogRole")
        storage.delete_many(storage.list(""))
    print("watchdog:", *table(policy, needed), sep="\n")
    assert refused(policy, needed) == set()
    assert unused(policy, needed) == set()


def table(policy: dict[str, Any], needed: set[Right]) -> Iterator[str]:
    """A line for each right that is granted: how many different requests have needed it."""
    for action, pattern in sorted(granted(policy)):
        count = sum(action == used and fnmatchcase(place, pattern) for used, place in needed)
        own = any(action == done and pattern.endswith(place) for done, place in BY_LAMBDA)
        yield f"{action:24}{pattern:76}{'by Lambda itself' if own else count}"
    yield f"refused: {sorted(refused(policy, needed)) or 'nothing'}"
