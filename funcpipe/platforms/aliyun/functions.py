"""Functions on Alibaba Function Compute: asynchronous tasks, which the service itself watches and stops."""

import os
import uuid
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

from alibabacloud_fc20230330 import models
from darabonba.exceptions import DaraException
from darabonba.runtime import RuntimeOptions

from funcpipe.core import FunctionSize, Invocation, Plan, PlatformSpec
from funcpipe.core.log_lines import RawLine
from funcpipe.errors import PlatformRefused
from funcpipe.platforms.aliyun.account import Account, code_of, explained
from funcpipe.platforms.aliyun.names import bucket_name, function_name, platform_url, storage_by_domain, storage_url
from funcpipe.platforms.aliyun.run_logs import read_logs
from funcpipe.platforms.base import Cause, Handle, State, Status, StorageUrls
from funcpipe.platforms.shared.key_wrap import SECRET, KeyWrap, wrap_of_environment
from funcpipe.platforms.shared.polling import STOP_WITHIN_S, Polling, payload_of

POLLING = Polling(every_s=2.0)
"""Pause between two requests for a function's state, which are free."""

_DEPLOY = "`funcpipe deploy aliyun --sizes …` makes them"
_AT_WORK = {"Enqueued", "Dequeued", "Running", "Retrying", "Stopping"}
_OUT_OF_MEMORY = ("out of memory", "oom", "memory limit", "memory usage exceeds")
_TIMED_OUT = ("time out after", "timed out after", "timeout")


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
        self._known: dict[Handle, tuple[float, Status]] = {}

    @property
    def spec(self) -> PlatformSpec:
        """What the platform offers."""
        return self._spec

    @property
    def url(self) -> str:
        """What `catalog.open_platform` opens it again by."""
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
        """Nothing to do: functions run on by themselves."""

    def wrap_key(self, run_key: str) -> str:
        """The text of a run's key as only functions of this deployment can read it."""
        return self._key_wrap.wrap(run_key)

    def unwrap_key(self, wrapped: str) -> str:
        """The inverse, in a function. Raises PlatformRefused for what was wrapped for another deployment."""
        return self._key_wrap.unwrap(wrapped)

    def logs(self, run: str) -> Iterator[RawLine]:
        """What the log service has of the functions of `run`."""
        return read_logs(self._account, self._deployment, run)

    def check(self, plan: Plan) -> None:
        """Raise PlatformRefused if the service would not run `plan`: functions that are not there, or too many."""
        sizes = sorted({stage.size for stage in plan.stages})
        command = f"funcpipe deploy aliyun --name {self._deployment} --region {self._region} --sizes {','.join(sizes)}"
        for size in sizes:
            self._check_function(self._spec.size(size), command)
        needed = len(plan.stages) * plan.replicas
        if needed > self._spec.max_functions:
            raise PlatformRefused(
                f"the plan needs {needed} functions at once, an account has {self._spec.max_functions} instances in "
                f"{self._region}; request more in the Quota Center and say so with --spec, or plan with --max-functions"
            )

    def of_deployed_sizes(self) -> "AliyunPlatform":
        """The same, whose specification has only the sizes that there are functions of."""
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
        """Start a function and return at once; raises PlatformRefused for what the service would not run."""
        payload = payload_of(worker, self._spec, self.wrap_key)
        function, task = function_name(self._deployment, worker.size), f"task-{uuid.uuid4()}"
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
        return Handle(worker=worker.worker, name=f"{function}/{task}")

    def status(self, handle: Handle) -> Status:
        """The function's state, at most `polling.every_s` old."""
        asked_s, status = self._known.get(handle, (float("-inf"), Status(state=State.RUNNING)))
        if status.state is State.RUNNING and self._polling.is_due(asked_s):
            function, task = handle.name.split("/")
            with explained(f"asking for the state of {handle.name}"):
                found = self._client.get_async_task(function, task, models.GetAsyncTaskRequest()).body
            status = status_of(found.status, found.task_error_message or "")
            self._known[handle] = self._polling.clock(), status
        return status

    def stop(self, handle: Handle) -> None:
        """End the function if it still runs; return when it has ended, or raise DeadlineExceeded."""
        if self.status(handle).state is not State.RUNNING:
            return
        function, task = handle.name.split("/")
        with explained(f"stopping {handle.name}"):
            self._client.stop_async_task(function, task, models.StopAsyncTaskRequest())
        late = f"{handle.name} has not ended {STOP_WITHIN_S:g} s after it was told to"
        self._polling.await_end(lambda: self.status(handle), late)

    @cached_property
    def _key_wrap(self) -> KeyWrap:
        """The deployment's, by its secret: a function's environment has it, and clients ask the service for that."""
        if SECRET in os.environ:
            return wrap_of_environment()
        for function in self._account.deployed(self._deployment):
            if secret := (function.environment_variables or {}).get(SECRET):
                return KeyWrap(secret)
        raise PlatformRefused(f"no function of {self._deployment} in {self._region} has a secret; {_DEPLOY}")

    def _check_function(self, size: FunctionSize, command: str) -> None:
        name = function_name(self._deployment, size.name)
        found = self._found(name)
        if found is None:
            raise PlatformRefused(f"there is no function {name} in {self._region}; run: {command}")
        if (found.memory_size, found.cpu) != (size.memory_mb, size.vcpu):
            raise PlatformRefused(
                f"{name} has {found.cpu:g} vCPU and {found.memory_size} MB: somebody changed it; run: {command}"
            )
        if (found.state or "Active") != "Active":
            raise PlatformRefused(f"{name} is {found.state}: {found.state_reason}; run: {command}")

    def _found(self, function: str) -> Any:
        """What the service knows of a function; None where there is none."""
        with explained(f"looking at {function}"):
            try:
                return self._client.get_function(function, models.GetFunctionRequest()).body
            except DaraException as error:
                if code_of(error) != "FunctionNotFound":
                    raise
                return None


def status_of(state: str, message: str) -> Status:
    """What the state of an asynchronous task, and its error's message, say of the function."""
    if state in _AT_WORK:
        return Status(state=State.RUNNING)
    if state == "Succeeded":
        return Status(state=State.DONE)
    words = message.lower()
    cause = Cause.CRASHED
    if any(word in words for word in _OUT_OF_MEMORY):
        cause = Cause.OUT_OF_MEMORY
    elif any(word in words for word in _TIMED_OUT):
        cause = Cause.TIMED_OUT
    return Status(state=State.FAILED, reason=f"{state.lower()}: {message or 'without a message'}", cause=cause)
