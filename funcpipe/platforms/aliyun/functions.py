"""Functions on Alibaba Function Compute: asynchronous tasks, which the service itself watches and stops."""

import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
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
from funcpipe.platforms.aliyun.cards import card_of
from funcpipe.platforms.aliyun.endings import read_logs, status_of
from funcpipe.platforms.base import Handle, State, Status, StorageUrls
from funcpipe.platforms.shared.cloud import SECRET, Capacity, CloudPlatform, Polling

_log = logging.getLogger(__name__)

POLLING = Polling(every_s=2.0)
"""Pause between two requests for a function's state, which are free."""

ASKED_ONE_BY_ONE = 16
"""Of more tasks of a function that this process has started, all are listed, 100 with a request."""

_SKEW_S = 600.0
"""A task that began, by the service's clock, so much before this process started it is still listed."""

_READY_WITHIN_S = 300.0
"""A function that is Pending, as its image is made ready, and not Active by then is given up."""


class AliyunPlatform(CloudPlatform):
    """Runs the functions that `funcpipe deploy aliyun --name DEPLOYMENT` made.

    `domain` is a custom domain of its bucket, a URL, for clients whom OSS refuses its public endpoint.
    """

    CLOUD = "aliyun"

    def __init__(
        self,
        spec: PlatformSpec,
        account: Account,
        *,
        deployment: str = "funcpipe",
        domain: str | None = None,
        polling: Polling = POLLING,
    ) -> None:
        super().__init__(spec, account.region, deployment=deployment, polling=polling)
        self._account, self._domain = account, domain
        self._client: Any = account.functions
        self._known: dict[Handle, tuple[float, Status]] = {}
        self._started_s: dict[Handle, float] = {}
        self._listed: dict[str, tuple[float, frozenset[str]]] = {}
        self._listing, self._may_list = threading.Lock(), True

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

    def logs(self, run: str) -> Iterator[RawLine]:
        """Return the lines that the log service has of the functions of `run`."""
        return read_logs(self._account, self._deployment, run)

    def status(self, handle: Handle) -> Status:
        """The function's state, at most twice `polling.every_s` old, or the last known one if there is no answer."""
        asked_s, status = self._known.get(handle, (float("-inf"), Status(state=State.RUNNING)))
        if status.state is State.RUNNING and self._polling.is_due(asked_s):
            self._known[handle] = self._polling.clock(), status
            self._outages.ask(lambda: self._poll(handle))
        return self._known[handle][1]

    def invoke(self, worker: Invocation) -> Handle:
        """Start a function, as any cloud does; its state may be listed."""
        started_s = time.time()
        handle = super().invoke(worker)
        self._started_s[handle] = started_s
        return handle

    @contextmanager
    def _asked_to_stop(self, handle: Handle) -> Iterator[str]:
        function, task = handle.name.split("/")
        with explained(f"stopping {handle.name}"):
            self._client.stop_async_task(function, task, models.StopAsyncTaskRequest())
        yield ""

    def _name_of(self, size: str, memory_mb: int) -> str:
        return function_name(self._deployment, size)

    def _with(self, spec: PlatformSpec) -> "AliyunPlatform":
        return AliyunPlatform(
            spec, self._account, deployment=self._deployment, domain=self._domain, polling=self._polling
        )

    def _secrets(self) -> Iterator[str | None]:
        functions = self._account.deployed(self._deployment)
        return ((function.environment_variables or {}).get(SECRET) for function in functions)

    def _check_functions(self, plan: Plan) -> None:
        sizes = sorted({stage.size for stage in plan.stages})
        for size in sizes:
            self._check_function(self._spec.size(size), self._deploy(sizes))

    def _start(self, function: str, payload: bytes) -> str:
        """Invoke a function as a task of its own name, of which there is only one however often it is invoked."""
        task = f"task-{uuid.uuid4()}"
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
        return f"{function}/{task}"

    def _poll(self, handle: Handle) -> None:
        function, task = handle.name.split("/")
        if self._is_listed(function, task):
            return
        with explained(f"asking for the state of {handle.name}"):
            found = self._client.get_async_task(function, task, models.GetAsyncTaskRequest()).body
        self._learn(handle, found)

    def _is_listed(self, function: str, task: str) -> bool:
        """Return True if the last listing of a function's tasks had this one; list them again if it is time."""
        with self._listing:
            listed_s, tasks = self._listed.get(function, (float("-inf"), frozenset[str]()))
            if self._polling.is_due(listed_s):
                tasks = frozenset(self._list(function))
                self._listed[function] = self._polling.clock(), tasks
            return task in tasks

    def _list(self, function: str) -> Iterator[str]:
        """Learn the states of a function's tasks that were started here, if many are at work; yield those learned."""
        at_work = {
            handle.name: handle
            for handle in list(self._started_s)
            if handle.name.startswith(f"{function}/") and not self._has_ended(handle)
        }
        if not self._may_list or len(at_work) <= ASKED_ONE_BY_ONE:
            return
        since_s = min(self._started_s[handle] for handle in at_work.values()) - _SKEW_S
        try:
            for found in self._account.tasks(function, since_s=since_s):
                if (handle := at_work.get(f"{function}/{found.task_id}")) is not None:
                    self._learn(handle, found)
                    yield str(found.task_id)
        except PlatformRefused as error:
            self._may_list = False
            _log.info("asks for the state of each function, as tasks may not be listed: %s", error)

    def _has_ended(self, handle: Handle) -> bool:
        return handle in self._known and self._known[handle][1].state is not State.RUNNING

    def _learn(self, handle: Handle, found: Any) -> None:
        """Note the state of a task as the service describes it."""
        function = handle.name.split("/")[0]
        memory = {function_name(self._deployment, size.name): size.memory_mb for size in self._spec.sizes}
        status = status_of(found.status, found.task_error_message or "", memory.get(function))
        self._known[handle] = self._polling.clock(), status

    def _capacities(self, needed: Counter[str]) -> Iterator[Capacity]:
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
                "shows fewer, and say what it shows with --set platform.spec=FILE"
            ),
        )

    def _check_function(self, size: FunctionSize, deploy: str) -> None:
        name = function_name(self._deployment, size.name)
        found = self._settled(name)
        if found is None:
            raise PlatformRefused(f"there is no function {name} in {self._region}; {deploy}")
        if (found.memory_size, found.cpu) != (size.memory_mb, size.vcpu):
            raise PlatformRefused(f"{name} has {found.cpu:g} vCPU and {found.memory_size} MB: it was changed; {deploy}")
        card, gpu = card_of(size), found.gpu_config
        if (gpu.gpu_type if gpu else None) != (card.kind if card else None):
            raise PlatformRefused(f"{name} has {gpu.gpu_type if gpu else 'no GPU'}: it was changed; {deploy}")
        if (found.state or "Active") != "Active":
            raise PlatformRefused(f"{name} is {found.state}: {found.state_reason}; {deploy}")
        if found.last_update_status == "Failed":
            raise PlatformRefused(f"{name} could not be updated: {found.last_update_status_reason}; {deploy}")

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
