"""Functions on Alibaba Function Compute: asynchronous tasks, which the service itself watches and stops."""

import os
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

from alibabacloud_fc20230330 import models
from darabonba.exceptions import DaraException
from darabonba.runtime import RuntimeOptions

from funcpipe.core import FunctionSize, Invocation, Plan, PlatformSpec
from funcpipe.core.logs import RawLine
from funcpipe.errors import DeadlineExceeded, PlatformRefused
from funcpipe.platforms.aliyun.account import (
    Account,
    bucket_name,
    code_of,
    explained,
    function_name,
    platform_url,
    storage_by_domain,
    storage_url,
)
from funcpipe.platforms.aliyun.endings import read_logs, status_of
from funcpipe.platforms.base import Handle, State, Status, StorageUrls
from funcpipe.platforms.shared.cloud import (
    SECRET,
    STOP_WITHIN_S,
    Capacity,
    KeyWrap,
    OutageTolerance,
    Polling,
    check_capacity,
    payload_of,
    wrap_of_environment,
)

POLLING = Polling(every_s=2.0)
"""Pause between two requests for a function's state, which are free."""

_DEPLOY = "`funcpipe deploy aliyun --sizes …` makes them"
_READY_WITHIN_S = 300.0
"""A function that is Pending, as its image is made ready, and not Active by then is given up."""


class AliyunPlatform:
    """Runs the functions that `funcpipe deploy aliyun --name DEPLOYMENT` made.

    `domain` is a custom domain of its bucket, a URL, for clients whom OSS refuses its public endpoint.
    """

    def __init__(
        self,
        spec: PlatformSpec,
        account: Account,
        *,
        deployment: str = "funcpipe",
        domain: str | None = None,
        polling: Polling = POLLING,
    ) -> None:
        self._spec = spec
        self._account, self._region = account, account.region
        self._client: Any = account.functions
        self._deployment, self._domain = deployment, domain
        self._polling = polling
        self._outages = OutageTolerance(polling)
        self._known: dict[Handle, tuple[float, Status]] = {}

    @property
    def spec(self) -> PlatformSpec:
        """The specification of the platform."""
        return self._spec

    @property
    def url(self) -> str:
        """The URL by which `catalog.open_platform` opens it again."""
        return platform_url(self._deployment, self._region, endpoint=self._account.endpoint, domain=self._domain)

    @property
    def storage_urls(self) -> StorageUrls:
        """The deployment's bucket: from outside for clients, over the data centre's network for functions."""
        bucket = bucket_name(self._deployment, self._account.number, self._region)
        outside = storage_url(bucket, self._region, internal=False)
        return StorageUrls(
            client=storage_by_domain(bucket, self._region, self._domain) if self._domain else outside,
            functions=storage_url(bucket, self._region, internal=True),
        )

    def detach(self) -> None:
        """Do nothing: functions run on by themselves."""

    def wrap_key(self, run_key: str) -> str:
        """Return the text of a run's key as only functions of this deployment can read it."""
        return self._key_wrap.wrap(run_key)

    def unwrap_key(self, wrapped: str) -> str:
        """Return the inverse, in a function. Raises PlatformRefused for what was wrapped for another deployment."""
        return self._key_wrap.unwrap(wrapped)

    def logs(self, run: str) -> Iterator[RawLine]:
        """Return the lines that the log service has of the functions of `run`."""
        return read_logs(self._account, self._deployment, run)

    def check(self, plan: Plan, *, run_s: float | None = None) -> None:
        """Raise PlatformRefused if the service would not run `plan`: functions that are not there, or too many.

        Too many are also those that could not hand over in a run of `run_s`.
        """
        sizes = sorted({stage.size for stage in plan.stages})
        command = f"funcpipe deploy aliyun --name {self._deployment} --region {self._region} --sizes {','.join(sizes)}"
        for size in sizes:
            self._check_function(self._spec.size(size), command)
        check_capacity(self._capacities(plan), lifetime_s=self._spec.lifetime_s, run_s=run_s)

    def of_deployed_sizes(self) -> "AliyunPlatform":
        """Return the same, whose specification has only the sizes that there are functions of."""
        names = {size: function_name(self._deployment, size.name) for size in self._spec.sizes}
        sizes = tuple(size for size, name in names.items() if self._found(name) is not None)
        if not sizes:
            raise PlatformRefused(f"there are no functions of {self._deployment} in {self._region}; {_DEPLOY}")
        return AliyunPlatform(
            replace(self._spec, sizes=sizes),
            self._account,
            deployment=self._deployment,
            domain=self._domain,
            polling=self._polling,
        )

    def invoke(self, worker: Invocation) -> Handle:
        """Start a function and return at once; raises PlatformBusy, or PlatformRefused for what would not run there."""
        payload = payload_of(worker, self._spec, self.wrap_key)
        function, task = function_name(self._deployment, worker.size), f"task-{uuid.uuid4()}"
        self._start(function, task, payload)
        return Handle(worker=worker.worker, name=f"{function}/{task}")

    def status(self, handle: Handle) -> Status:
        """The function's state, at most `polling.every_s` old, or the last known if the service does not answer."""
        asked_s, status = self._known.get(handle, (float("-inf"), Status(state=State.RUNNING)))
        if status.state is State.RUNNING and self._polling.is_due(asked_s):
            self._known[handle] = self._polling.clock(), status
            self._outages.ask(lambda: self._poll(handle))
        return self._known[handle][1]

    def stop(self, handle: Handle) -> None:
        """End the function if it still runs; return when it has ended, or raise DeadlineExceeded."""
        if self.status(handle).state is not State.RUNNING:
            return
        function, task = handle.name.split("/")
        with explained(f"stopping {handle.name}"):
            self._client.stop_async_task(function, task, models.StopAsyncTaskRequest())
        late = f"{handle.name} has not ended {STOP_WITHIN_S:g} s after it was asked to"
        self._polling.await_end(lambda: self.status(handle), late)

    @cached_property
    def _key_wrap(self) -> KeyWrap:
        """The deployment's wrap, by its secret: functions have it in their environment, clients ask for it."""
        if SECRET in os.environ:
            return wrap_of_environment()
        for function in self._account.deployed(self._deployment):
            if secret := (function.environment_variables or {}).get(SECRET):
                return KeyWrap(secret)
        raise PlatformRefused(f"no function of {self._deployment} in {self._region} has a secret; {_DEPLOY}")

    def _start(self, function: str, task: str, payload: bytes) -> None:
        """Invoke a function as the task of that name, of which there is only one however often it is invoked."""
        with explained(f"invoking {function}"):
            try:
                self._client.invoke_function_with_options(
                    function,
                    models.InvokeFunctionRequest(body=payload),
                    models.InvokeFunctionHeaders(x_fc_invocation_type="Async", x_fc_async_task_id=task),
                    RuntimeOptions(),
                )
            except DaraException as error:
                if code_of(error) != "AsyncTaskAlreadyExists":  # an answer was lost, and the SDK asked again
                    raise

    def _poll(self, handle: Handle) -> None:
        function, task = handle.name.split("/")
        with explained(f"asking for the state of {handle.name}"):
            found = self._client.get_async_task(function, task, models.GetAsyncTaskRequest()).body
        memory = {function_name(self._deployment, size.name): size.memory_mb for size in self._spec.sizes}
        status = status_of(found.status, found.task_error_message or "", memory.get(function))
        self._known[handle] = self._polling.clock(), status

    def _capacities(self, plan: Plan) -> Iterator[Capacity]:
        """Yield the capacity of each function that has a quota of its own, and that of the region for all others."""
        names = [function_name(self._deployment, stage.size) for stage in plan.stages] * plan.replicas
        needed = Counter(names)
        with explained("asking for quotas of functions"):
            quotas = dict(self._account.function_quotas())
        for name in needed.keys() & quotas.keys():
            yield Capacity(
                needed=needed.pop(name),
                allowed=quotas[name],
                limit=f"{name} may have {quotas[name]} instances, its quota in {self._region}",
                more=lambda wanted: f"set its quota to {wanted}, or to none, in the console of Function Compute",
            )
        left = self._spec.max_functions - sum(quotas.values())
        yield Capacity(
            needed=needed.total(),
            allowed=max(left, 0),
            limit=f"an account has {self._spec.max_functions} instances in {self._region}, as far as the specification "
            "knows" + (f", of which its functions' quotas leave {left} to others" if quotas else ""),
            fewer="plan with --max-functions",
            more=lambda wanted: (
                f"look in the Quota Center, under General Quotas: request {wanted + sum(quotas.values())} there if it "
                "shows fewer, and say what it shows with --spec"
            ),
        )

    def _check_function(self, size: FunctionSize, command: str) -> None:
        name = function_name(self._deployment, size.name)
        found = self._settled(name)
        if found is None:
            raise PlatformRefused(f"there is no function {name} in {self._region}; run: {command}")
        if (found.memory_size, found.cpu) != (size.memory_mb, size.vcpu):
            raise PlatformRefused(
                f"{name} has {found.cpu:g} vCPU and {found.memory_size} MB: it was changed; run: {command}"
            )
        if (found.state or "Active") != "Active":
            raise PlatformRefused(f"{name} is {found.state}: {found.state_reason}; run: {command}")
        if found.last_update_status == "Failed":
            raise PlatformRefused(f"{name} could not be updated: {found.last_update_status_reason}; run: {command}")

    def _settled(self, function: str) -> Any:
        """Return the service's description of a function, once its image is ready; None where there is none.

        A new function is Pending before, which cannot be invoked; one that is being updated runs what it was before
        (help.aliyun.com/en/functioncompute/fc/user-guide/states-of-custom-container-functions, 2026-08).
        """
        until_s = self._polling.clock() + _READY_WITHIN_S
        while (found := self._found(function)) is not None:
            if found.state != "Pending" and found.last_update_status != "InProgress":
                return found
            if self._polling.clock() > until_s:
                doing = "is Pending" if found.state == "Pending" else "is being updated"
                raise DeadlineExceeded(
                    f"{function} {doing} after {_READY_WITHIN_S:g} s: {found.state_reason or 'no reason given'}; "
                    "try again, or look at its image"
                )
            self._polling.sleep(self._polling.every_s)
        return None

    def _found(self, function: str) -> Any:
        """Return the service's description of a function; None where there is none."""
        with explained(f"looking at {function}"):
            try:
                return self._client.get_function(function, models.GetFunctionRequest()).body
            except DaraException as error:
                if code_of(error) != "FunctionNotFound":
                    raise
                return None
