"""Functions on AWS Lambda: invoked as events, watched through their deployment's logs and records of failures."""

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from typing import Any

from funcpipe.core import Plan, PlatformSpec, RequestCounts
from funcpipe.core.logs import RawLine
from funcpipe.core.provisioned import Provisioned
from funcpipe.errors import DeadlineExceeded, PlatformRefused
from funcpipe.platforms.aws import endings
from funcpipe.platforms.aws.account import Account, account_capacity, explained, reserved_capacity
from funcpipe.platforms.aws.endings import read_logs
from funcpipe.platforms.aws.provisioned import ALIAS, ProvisionedConcurrency
from funcpipe.platforms.aws.resources import (
    ARCHITECTURE,
    FAILURES,
    LEAST_MEMORY_MB,
    MOST_MEMORY_MB,
    RUNS,
    bucket_in,
    check_processors,
    function_name,
    log_group,
)
from funcpipe.platforms.base import SHARE, Handle, RequestMeter, State, Status, StorageUrls
from funcpipe.platforms.shared.cloud import SECRET, Capacity, CloudPlatform, Polling

POLLING = Polling(every_s=3.0)
"""Pause between two polls of logs and records: a listing, $0.006 an hour, and a search that is free."""

_SKEW_S = 120  # how far the clocks of this machine and of AWS may differ
_RUNNING = Status(state=State.RUNNING)


class AwsPlatform(CloudPlatform):
    """Runs the functions that `funcpipe deploy aws --name DEPLOYMENT` made.

    A function cannot be ended from outside: `stop` leaves an object that it polls for.
    """

    CLOUD = "aws"

    def __init__(
        self,
        spec: PlatformSpec,
        account: Account,
        *,
        deployment: str = "funcpipe",
        polling: Polling = POLLING,
        meter: RequestMeter | None = None,
        share: float | None = None,
    ) -> None:
        """Count the requests to the bucket in `meter`. Functions that are kept ready cost `share` of their price."""
        super().__init__(spec, account.region, deployment=deployment, polling=polling)
        self._account = account
        self._meter = meter or RequestMeter()
        self._share = share
        self._lambda: Any = account.client("lambda")
        self._objects: Any = account.client("s3")
        self._logs: Any = account.client("logs")
        self._bucket = bucket_name(deployment, account)
        self._open: dict[Handle, None] = {}
        self._asking = threading.Lock()
        self._ended: dict[str, Status] = {}
        self._seen: set[str] = set()
        self._looked_s = float("-inf")

    @property
    def url(self) -> str:
        """The URL by which `catalog.open_platform` opens it again."""
        share = "" if self._share is None else f"&{SHARE}={self._share:g}"
        return f"aws-lambda://{self._deployment}?region={self._region}{share}"

    @property
    def storage_urls(self) -> StorageUrls:
        """The deployment's bucket."""
        url = f"s3://{self._bucket}/{RUNS}?region={self._region}"
        return StorageUrls(client=url, functions=url)

    def logs(self, run: str) -> Iterator[RawLine]:
        """Return the lines of the functions of `run` in the deployment's log group."""
        with explained(f"reading the logs of {run}"):
            yield from read_logs(self._logs, log_group(self._deployment), run)

    def status(self, handle: Handle) -> Status:
        """Return the function's state, at most `polling.every_s` old, or the last known one if AWS does not answer."""
        request = handle.name.split("/")[1]
        with self._asking:
            if request not in self._ended:
                self._open[handle] = None
                self._outages.ask(self._poll)
            return self._ended.get(request, _RUNNING)

    def provision(self, plan: Plan, run: str, wanted: Provisioned) -> "AwsPlatform":
        """Return the same platform, which invokes functions that are kept ready: see `ProvisioningPlatform`."""
        counts = Counter({self._function_of(stage): wanted.spare.get(stage.size, 0) for stage in plan.stages})
        counts.update(self._function_of(stage) for stage in plan.stages * plan.replicas)
        concurrency = ProvisionedConcurrency(self._account, self._polling)
        concurrency.provision(counts, run, released_after_s=wanted.released_after_s)
        return self._again(self._spec, wanted.share)

    def release(self, plan: Plan, run: str) -> None:
        """Keep no function of `plan` ready any more that was for `run`."""
        names = {self._function_of(stage) for stage in plan.stages}
        ProvisionedConcurrency(self._account, self._polling).release(sorted(names), run)

    @contextmanager
    def _asked_to_stop(self, handle: Handle) -> Iterator[str]:
        key = f"stops/{handle.name.split('/')[1]}"
        with explained(f"stopping {handle.name}"):
            self._objects.put_object(Bucket=self._bucket, Key=key, Body=b"")
            self._meter.add(RequestCounts(puts=1))
        yield f"; it is paid for until its time is over, {self._spec.lifetime_s or 0:g} s after its start"
        with explained(f"stopping {handle.name}"):
            self._objects.delete_object(Bucket=self._bucket, Key=key)

    def _start(self, function: str, payload: bytes) -> str:
        with explained(f"invoking {function}"):
            alias = None if self._share is None else ALIAS
            request = invoke_awake(self._lambda, function, payload, self._polling, alias=alias)
        return f"{function}/{request}/{int(self._polling.clock())}"

    def _name_of(self, size: str, memory_mb: int) -> str:
        return function_name(self._deployment, memory_mb)

    def _with(self, spec: PlatformSpec) -> "AwsPlatform":
        return self._again(spec, self._share)

    def _again(self, spec: PlatformSpec, share: float | None) -> "AwsPlatform":
        return AwsPlatform(
            spec,
            self._account,
            deployment=self._deployment,
            polling=self._polling,
            meter=self._meter,
            share=share,
        )

    def _secrets(self) -> Iterator[str | None]:
        for size in self._spec.sizes:
            found = self._found(function_name(self._deployment, size.memory_mb)) or {}
            yield found.get("Environment", {}).get("Variables", {}).get(SECRET)

    def _check_functions(self, plan: Plan) -> None:
        sizes = sorted({stage.memory_mb for stage in plan.stages})
        for memory in sizes:
            self._check_function(memory, plan.platform, self._deploy(f"{size}MB" for size in sizes))

    def _check_function(self, memory_mb: int, platform: str, deploy: str) -> None:
        if not LEAST_MEMORY_MB <= memory_mb <= MOST_MEMORY_MB:
            raise PlatformRefused(
                f"the plan asks for functions of {memory_mb} MB, Lambda has {LEAST_MEMORY_MB} to {MOST_MEMORY_MB}"
            )
        name = function_name(self._deployment, memory_mb)
        found = self._found(name)
        if found is None:
            raise PlatformRefused(f"there is no function {name} in {self._region}; {deploy}")
        if found["MemorySize"] != memory_mb:
            raise PlatformRefused(f"{name} has {found['MemorySize']} MB: it was changed; {deploy}")
        check_processors(platform, found.get("Architectures", [ARCHITECTURE])[0], functions=f"{name} has")

    def _capacities(self, needed: Counter[str]) -> Iterator[Capacity]:
        with explained("asking for the account's concurrency"):
            unreserved = self._lambda.get_account_settings()["AccountLimit"]["UnreservedConcurrentExecutions"]
            own = {name: self._lambda.get_function(FunctionName=name).get("Concurrency") for name in needed}
        for name, concurrency in own.items():
            if concurrency is not None:
                reserved = concurrency["ReservedConcurrentExecutions"]
                yield reserved_capacity(name, needed.pop(name), reserved, self._region)
        yield account_capacity(needed.total(), unreserved, self._region)

    def _make_ready(self, functions: Set[str]) -> None:
        where = f"--name {self._deployment} --region {self._region}"
        remedy = f"run: funcpipe destroy aws {where}, and deploy again"
        with explained("waking functions"):
            wake(self._lambda, sorted(functions), self._polling, remedy=remedy)

    def _found(self, function: str) -> Any:
        with explained(f"looking at {function}"):
            try:
                return self._lambda.get_function_configuration(FunctionName=function)
            except self._lambda.exceptions.ResourceNotFoundException:
                return None

    def _poll(self) -> None:
        """Read the logs and records since the oldest function that is not known to have ended, but not too often."""
        if not self._polling.is_due(self._looked_s):
            return
        self._looked_s = self._polling.clock()
        waiting = [handle for handle in self._open if handle.name.split("/")[1] not in self._ended]
        if not waiting:
            return
        since_s = min(int(handle.name.split("/")[2]) for handle in waiting) - _SKEW_S
        with explained("reading how functions ended"):
            for event in self._reports(since_s):
                found = endings.of_report(event["message"])
                if found is not None:
                    self._ended.setdefault(*found)
            for function in sorted({handle.name.split("/")[0] for handle in waiting}):
                self._read_failures(function, since_s)
        self._open = {handle: None for handle in waiting if handle.name.split("/")[1] not in self._ended}

    def _reports(self, since_s: int) -> Iterator[dict[str, Any]]:
        pages = self._logs.get_paginator("filter_log_events").paginate(
            logGroupName=log_group(self._deployment),
            startTime=1000 * since_s,
            filterPattern='{ $.type = "platform.report" }',
        )
        return (event for page in pages for event in page["events"])

    def _read_failures(self, function: str, since_s: int) -> None:
        """Read the records that came since: their keys go on with year, month, day and time."""
        folder = f"{FAILURES}/{function}/"
        pages = self._objects.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=folder, StartAfter=folder + time.strftime("%Y/%m/%d/", time.gmtime(since_s))
        )
        for page in pages:
            self._meter.add(RequestCounts(lists=1))
            self._read_records([item["Key"] for item in page.get("Contents", ())])

    def _read_records(self, keys: Iterable[str]) -> None:
        for key in keys:
            if key not in self._seen:
                self._meter.add(RequestCounts(gets=1))
                record = self._objects.get_object(Bucket=self._bucket, Key=key)["Body"].read()
                self._seen.add(key)
                self._ended.setdefault(*endings.of_failure(record.decode()))


def bucket_name(deployment: str, account: Account) -> str:
    """Return the bucket of a deployment."""
    return bucket_in(account.number, account.region, deployment=deployment)


# Lambda drops the image of functions that were idle for weeks, and makes it anew on invocation. Such a function is
# Inactive. The invocation that wakes it is rejected; it is Pending until its image is there again, then Active; if that
# fails, it is Inactive again, or Failed (docs.aws.amazon.com/lambda/latest/dg/images-create.html and
# functions-states.html, 2026-11). It takes a minute or two (github.com/aws-solutions-library-samples/
# accelerated-intelligent-document-processing-on-aws/issues/801: 40 to 106 s).

WAKE_WITHIN_S = 300.0
"""A function that is not Active by then is given up."""

WAKING = "{}"
"""The payload that only wakes. A function that is awake already does nothing with it."""

_NOT_ACTIVE = {"CodeArtifactUserPendingException", "ResourceConflictException"}
_SLEEPING = {"Idle", "Restoring", "Creating", ""}


def wake(functions: Any, names: Iterable[str], polling: Polling, *, remedy: str) -> None:
    """Return when all functions called `names` are Active, after waking those that sleep, all at once.

    `functions` is Lambda's client. Raises PlatformRefused, which ends with the `remedy`, for a function that Lambda
    cannot make ready, and DeadlineExceeded for one that is not by WAKE_WITHIN_S.
    """
    until_s = polling.clock() + WAKE_WITHIN_S
    invoked: set[str] = set()
    waiting = list(names)
    while True:
        found = [functions.get_function_configuration(FunctionName=name) for name in waiting]
        asleep = [one for one in found if one.get("State", "Active") != "Active"]
        if not asleep:
            return
        waiting = [one["FunctionName"] for one in asleep]
        for one in asleep:
            _check(one, remedy, was_invoked=one["FunctionName"] in invoked)
            if one["State"] == "Inactive":
                _invoke(functions, one["FunctionName"], WAKING.encode())
                invoked.add(one["FunctionName"])
        if polling.clock() > until_s:
            raise DeadlineExceeded(f"{_late(waiting[0])}: it is {_described(asleep[0])}; try again, or {remedy}")
        polling.sleep(polling.every_s)


def invoke_awake(functions: Any, name: str, payload: bytes, polling: Polling, *, alias: str | None = None) -> str:
    """Invoke a function, or what its `alias` names, again and again while it wakes up; returns the request's name.

    Raises DeadlineExceeded for a function that has not become Active by WAKE_WITHIN_S.
    """
    until_s = polling.clock() + WAKE_WITHIN_S
    while (request := _invoke(functions, name, payload, alias=alias)) is None:
        if polling.clock() > until_s:
            raise DeadlineExceeded(f"{_late(name)}, as an invocation needs")
        polling.sleep(polling.every_s)
    return request


def _invoke(functions: Any, name: str, payload: bytes, *, alias: str | None = None) -> str | None:
    """Return the name of the request; None where the function is not Active."""
    which = {"FunctionName": name} if alias is None else {"FunctionName": name, "Qualifier": alias}
    try:
        answer = functions.invoke(**which, InvocationType="Event", Payload=payload)
    except functions.exceptions.ClientError as error:
        if error.response["Error"]["Code"] in _NOT_ACTIVE:
            return None
        raise
    return str(answer["ResponseMetadata"]["RequestId"])


def _check(found: dict[str, Any], remedy: str, *, was_invoked: bool) -> None:
    """Raise PlatformRefused for a function that Lambda could not make ready."""
    is_lost = found["State"] == "Inactive" and was_invoked and found.get("StateReasonCode", "") not in _SLEEPING
    if is_lost or found["State"] not in {"Inactive", "Pending"}:
        raise PlatformRefused(f"{found['FunctionName']} is {_described(found)}; {remedy}")


def _described(found: dict[str, Any]) -> str:
    code = f" ({found['StateReasonCode']})" if "StateReasonCode" in found else ""
    return f"{found['State']}: {found.get('StateReason', 'no reason given')}{code}"


def _late(name: str) -> str:
    return f"{name} has not become Active within {WAKE_WITHIN_S:g} s"
