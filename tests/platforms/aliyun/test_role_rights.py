"""Runs on Function Compute that outlive their functions, and their client; and what the role of functions may do.

The role has the rights that functions need, by what these have asked for in such runs, and no others.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from funcpipe.client.control.status import status
from funcpipe.client.follow.launch import launch, launch_detached
from funcpipe.client.prepare.prepared_run import PreparedRun, prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import Outcome, PlatformSpec, RunSettings
from funcpipe.platforms.aliyun.account import Account
from funcpipe.platforms.aliyun.functions import AliyunPlatform
from funcpipe.platforms.catalog import open_storage
from funcpipe.platforms.shared.cloud import SECRET
from tests.cloud_emulation.aliyun import AliyunCloud
from tests.cloud_emulation.ram import PULLS, Ram
from tests.cloud_emulation.recording_proxy import RecordingProxy, Request
from tests.contract.faulty_proxy import answering
from tests.contract.oss_server import REGION, OssServer
from tests.e2e import small
from tests.platforms.aliyun.conftest import OFTEN, SIZE, sized
from tests.platforms.aliyun.test_functions import worker
from tests.platforms.hand_over import (
    LATE_S,
    LOOK_S,
    SHORT,
    WATCHED,
    assert_handed_over,
    assert_like_one_process,
    gated_job,
    long_job,
)

ROLE = "funcpipe-functions-cn-test"
BY_SERVICE = {"log:PostLogStoreLogs", "cr:GetAuthorizationToken", *PULLS}
"""What Function Compute itself does as the role: it writes logs and pulls the image (`aliyun.template.rights`)."""


class OfFunctions(AliyunPlatform):
    """A platform whose URL, as functions are told it, leads through a proxy."""

    told = ""

    @property
    def url(self) -> str:
        return self.told


def rights_of(request: Request) -> Iterator[tuple[str, str, str]]:
    """The actions that a request to OSS or Function Compute is, what each is done to, and a listing's prefix."""
    parts = request.path.strip("/").split("/", 1)
    bucket = f"acs:oss:*:1000:{parts[0]}"
    if request.action:
        name, *task = request.path.split("/functions/")[1].split("/")
        below = f"/{task[0]}/{task[1]}" if "async-tasks" in task else ""
        yield f"fc:{request.action}", f"acs:fc:{REGION}:1000:functions/{name}{below}", ""
    elif "delete" in request.options:
        yield from (("oss:DeleteObject", f"{bucket}/{key}", "") for key in request.deleted_keys())
    elif len(parts) == 1:
        assert request.method == "GET"
        yield "oss:ListObjects", bucket, request.options["prefix"]
    else:
        action = {"GET": "GetObject", "PUT": "PutObject", "DELETE": "DeleteObject"}[request.method]
        yield f"oss:{action}", f"{bucket}/{parts[1]}", ""


def table(ram: Ram, needed: set[tuple[str, str, str]]) -> Iterator[tuple[str, str, int]]:
    """How many different requests have needed each right that the role has."""
    for statement in ram.statements(ROLE):
        for action in statement["Action"]:
            for pattern in statement["Resource"]:
                yield action, pattern, sum(a == action and fnmatchcase(to, pattern) for a, to, _ in needed)


def test_functions_hand_over_and_outlive_their_client_and_may_do_nothing_else(
    deployed: Account,
    spec: PlatformSpec,
    url: str,
    cloud: AliyunCloud,
    oss: OssServer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv(small.GATES, str(tmp_path))
    cloud.environment |= {"ALIBABA_CLOUD_REGION": REGION, small.GATES: str(tmp_path)}
    with ExitStack() as stack:
        proxies = [stack.enter_context(answering(RecordingProxy(to))) for to in (oss.endpoint, cloud.endpoint)]
        told = url.replace(oss.endpoint, proxies[0].endpoint)
        site = Site(of_functions(deployed, spec, proxies[1]), open_storage(url), told)
        hand_over(site, spec, cloud)
        outlive_the_only_function(site, spec, cloud)
        (function,) = [cloud.functions[name] for name in cloud.functions if name.endswith(SIZE)]
        monkeypatch.setenv(SECRET, function["environmentVariables"][SECRET])
        asked = AliyunPlatform(spec, Account(region=REGION, endpoint=proxies[1].endpoint), polling=OFTEN)
        asked.stop(asked.invoke(worker(asked, url, small.sleeping_loss)))  # as functions do when a run is deleted
        needed = {right for proxy in proxies for request in proxy.seen for right in rights_of(request)}
    found = list(table(cloud.ram, needed))
    print("functions:", *(f"{action:26}{pattern:66}{count}" for action, pattern, count in found), sep="\n")
    assert {right for right in needed if not cloud.ram.allows(ROLE, *right)} == set()
    unused = {action for action, _, _ in found if action not in BY_SERVICE}
    assert unused == {action for action, _, count in found if count}


def of_functions(account: Account, spec: PlatformSpec, proxy: RecordingProxy) -> OfFunctions:
    platform = OfFunctions(replace(spec, cold_start_s=1.0), account, polling=OFTEN)
    platform.told = f"aliyun-fc://funcpipe?region={REGION}&endpoint={proxy.endpoint}"
    return platform


def hand_over(site: Site, spec: PlatformSpec, cloud: AliyunCloud) -> None:
    """Train a run whose functions invoke their successors."""
    job = replace(long_job(sized(small.plan(1, 1))), prices=spec)
    result = launch(prepare(job, session_on(site), faults=SHORT))
    assert_handed_over(result, job)
    assert len(cloud.tasks) >= len(result.workers)
    assert site.storage.list("") == ()


def outlive_the_only_function(site: Site, spec: PlatformSpec, cloud: AliyunCloud) -> None:
    """Train a run without its client, whose only function is killed, and which a watchdog restarts."""
    job, storage = replace(gated_job(sized(small.plan(1, 1))), prices=spec), site.storage

    def prepared(settings: RunSettings) -> PreparedRun:
        return prepare(job, session_on(site), faults=WATCHED, settings=settings)

    launch_detached(prepared(RunSettings(name="left")))
    while not [one for one in status(storage, "left").workers if one.step > 2]:
        time.sleep(LOOK_S)
    for instance in cloud.instances.values():
        instance.kill()
    small.open_gates(1)
    time.sleep(LATE_S)
    ((_, event),) = cloud.pass_a_minute()
    while [one for one in status(storage, "left").workers if one.outcome is not Outcome.FINISHED]:
        time.sleep(LOOK_S)
    assert cloud.tasks["funcpipe-watchdog", event]["status"] == "Succeeded"
    assert cloud.instances["funcpipe-watchdog", event].paths == ["/invoke"]
    assert [one.attempt for one in status(storage, "left").workers] == [1]
    assert_like_one_process(launch(prepared(RunSettings(resume="left"))), job)
    assert storage.list("") == ()
