"""What clouds share: checks of a plan, keys that are wrapped, polling for the state of functions, lines of logs."""

import hashlib
import json
import logging
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from funcpipe.core import Invocation, Plan, PlatformSpec, ServerFunctionSpec, Stage, WorkerSpec, to_text
from funcpipe.core.cached import cached_property
from funcpipe.core.logs import RawLine
from funcpipe.errors import DeadlineExceeded, PlatformBusy, PlatformRefused
from funcpipe.platforms.base import Handle, State, Status

_log = logging.getLogger(__name__)

STOP_WITHIN_S = 90.0
"""The time in which a function must end after it was asked to stop."""

BUSY_FOR_S = 600.0
"""The time without any answer after which a cloud has failed; until then functions count as running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Polling:
    """The interval at which a cloud is polled, and the clock."""

    every_s: float
    clock: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep

    def is_due(self, asked_s: float) -> bool:
        """Return True if it is time to repeat the poll made at `asked_s`."""
        return self.clock() - asked_s >= self.every_s

    def await_end(self, status: Callable[[], Status], late: str) -> None:
        """Return when `status` reports the end of a function; raises DeadlineExceeded, which says `late`."""
        until_s = self.clock() + STOP_WITHIN_S
        while status().state is State.RUNNING:
            if self.clock() > until_s:
                raise DeadlineExceeded(late)
            self.sleep(self.every_s)


class OutageTolerance:
    """Bridges the time in which a cloud does not answer when asked for the states of functions."""

    def __init__(self, polling: Polling) -> None:
        self._polling = polling
        self._busy_since_s: float | None = None

    def ask(self, request: Callable[[], None]) -> None:
        """Make a request for the states of functions; PlatformBusy is raised only after BUSY_FOR_S of nothing else."""
        now_s = self._polling.clock()
        try:
            request()
        except PlatformBusy as error:
            if self._busy_since_s is None:
                self._busy_since_s = now_s
                _log.warning("the state of functions cannot be read for now, they count as running: %s", error)
            if now_s - self._busy_since_s >= BUSY_FOR_S:
                raise
        else:
            self._busy_since_s = None


def payload_of(worker: Invocation, spec: PlatformSpec, wrap_key: Callable[[str], str]) -> bytes:
    """Return the payload of a function, the run's key wrapped; raises PlatformRefused for more than it may be."""
    if isinstance(worker, WorkerSpec | ServerFunctionSpec):
        worker = replace(worker, run_key=wrap_key(worker.run_key))
    payload = to_text(worker).encode()
    if len(payload) > spec.max_payload_bytes:
        raise PlatformRefused(
            f"the payload of worker {worker.worker} has {len(payload)} bytes, an asynchronous event of {spec.name} at "
            f"most {spec.max_payload_bytes}; fold layers together with profile --set model.layers=N"
        )
    return payload


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """A limit of `allowed` functions at once, which `limit` names, where a plan needs `needed`.

    `more` is advice to be allowed so many; `fewer`, before a number, advice to plan for at most that many.
    """

    needed: int
    allowed: int
    limit: str
    more: Callable[[int], str]
    fewer: str | None = None

    @property
    def handing_over(self) -> int:
        """The number of functions while all hand over: they begin together, so they leave together."""
        return 2 * self.needed

    def ways_out(self, most: int, wanted: int) -> str:
        """Return the advice: have at most so many functions, or be allowed as many as are wanted."""
        ways = [f"{self.fewer} {most}"] if self.fewer is not None and 0 < most < self.needed else []
        return ", or ".join([*ways, self.more(wanted)])


def check_capacity(capacities: Iterable[Capacity], *, lifetime_s: float | None, run_s: float | None) -> None:
    """Raise PlatformRefused for a plan with more functions than are allowed, and warn where its hand-overs must wait.

    Functions hand over in a run that takes longer than they live, `lifetime_s`. `run_s` is what it is expected to take,
    None where that is unknown. Clouds queue a successor until it may run, so it is enough if one more may.
    """
    for capacity in capacities:
        if capacity.needed > capacity.allowed:
            raise PlatformRefused(
                f"the plan needs {capacity.needed} functions at once, {capacity.limit}; "
                f"{capacity.ways_out(capacity.allowed, capacity.needed)}"
            )
        if lifetime_s is None or (run_s is not None and run_s <= lifetime_s):
            continue
        if capacity.handing_over > capacity.allowed:
            _check_hand_over(capacity, lifetime_s, run_s)


def _check_hand_over(capacity: Capacity, lifetime_s: float, run_s: float | None) -> None:
    """Refuse a run that is known to hand over where not one more function may run, warn of others."""
    becomes = (
        f"each runs beside its successor while it hands over, so that the plan's {capacity.needed} functions become "
        f"up to {capacity.handing_over}"
    )
    ways = f"{capacity.limit}; {capacity.ways_out(capacity.allowed // 2, capacity.handing_over)}"
    when = "if the run takes longer than" if run_s is None else f"the run takes about {run_s:.0f} s, a function at most"
    if run_s is not None and capacity.needed == capacity.allowed:
        raise PlatformRefused(f"{when} {lifetime_s:g} s: {becomes}, and {capacity.needed + 1} at least; {ways}")
    _log.warning(
        "%s %g s: %s; successors wait until functions have ended, up to %d at once, as %s",
        *(when, lifetime_s, becomes, capacity.handing_over - capacity.allowed, ways),
    )


SECRET = "FUNCPIPE_SECRET"
"""The environment variable of functions with their deployment's secret."""

_NONCE_BYTES = 12


def new_secret() -> str:
    """Return the secret of a new deployment."""
    return secrets.token_hex(32)


class KeyWrap:
    """Wraps and unwraps keys of runs with the `secret` of a deployment, which its functions have in their environment.

    Clouds keep the events of functions that fail, and so what invoked them, where others than the functions can read:
    the bucket, for one. Keys are wrapped with AES-256-GCM.
    """

    def __init__(self, secret: str) -> None:
        self._cipher = AESGCM(hashlib.sha256(secret.encode()).digest())

    def wrap(self, run_key: str) -> str:
        """Return a text that stands for `run_key` where others may read it."""
        nonce = os.urandom(_NONCE_BYTES)
        return (nonce + self._cipher.encrypt(nonce, run_key.encode(), None)).hex()

    def unwrap(self, wrapped: str) -> str:
        """Invert `wrap`. Raises PlatformRefused for a text that this deployment has not wrapped."""
        try:
            data = bytes.fromhex(wrapped)
            return self._cipher.decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], None).decode()
        except (ValueError, InvalidTag):
            raise PlatformRefused("the key of the run was not wrapped for this deployment of functions") from None


def wrap_of_environment() -> KeyWrap:
    """Return the unwrapping of a function. Raises PlatformRefused where its deployment has no secret."""
    secret = os.environ.get(SECRET)
    if not secret:
        raise PlatformRefused("this deployment has no secret: it was made by an earlier version; deploy again")
    return KeyWrap(secret)


def unwrap_payload(payload: str) -> str:
    """Return the payload of a worker with the run's key as it is; any other payload stays. Raises PlatformRefused."""
    try:
        invocation = json.loads(payload)
    except ValueError:
        return payload  # which is refused, and the error says why
    if not isinstance(invocation, dict) or not invocation.get("run_key"):
        return payload
    return json.dumps(invocation | {"run_key": wrap_of_environment().unwrap(str(invocation["run_key"]))})


def by_invocation(stream: str, events: Iterable[tuple[float, str]], begins: Callable[[str], bool]) -> Iterator[RawLine]:
    """Yield the lines of the `events` of one stream, moments with their texts in order.

    `begins` knows the text with which an invocation begins; what comes before the first, as the environment is made
    ready for it, is of the first.
    """
    number, has_begun = 0, False
    for time_s, text in events:
        if begins(text):
            number += has_begun
            has_begun = True
        for line in text.splitlines() or [""]:
            yield RawLine(function=f"{stream}/{number}", text=line, time_s=time_s)


class CloudPlatform(ABC):
    """The functions that `funcpipe deploy CLOUD --name DEPLOYMENT` made, and what clouds do about them in one way."""

    CLOUD: ClassVar[str]
    """The cloud, as `funcpipe deploy` names it."""

    def __init__(self, spec: PlatformSpec, region: str, *, deployment: str, polling: Polling) -> None:
        self._spec, self._region, self._deployment = spec, region, deployment
        self._polling, self._outages = polling, OutageTolerance(polling)

    @property
    def spec(self) -> PlatformSpec:
        """The specification of the platform."""
        return self._spec

    def detach(self) -> None:  # noqa: B027 - as clouds need nothing for it
        """Do nothing: functions run on by themselves."""

    def wrap_key(self, run_key: str) -> str:
        """Return the text of a run's key as only functions of this deployment can read it."""
        return self._key_wrap.wrap(run_key)

    def unwrap_key(self, wrapped: str) -> str:
        """Return the inverse, in a function. Raises PlatformRefused for what was wrapped for another deployment."""
        return self._key_wrap.unwrap(wrapped)

    def check(self, plan: Plan, *, run_s: float | None = None) -> None:
        """Raise PlatformRefused if the cloud would not run `plan`: functions not there or not as planned, too many.

        Too many are also those that could not hand over in a run of `run_s`. Functions are ready afterwards.
        """
        self._check_functions(plan)
        names = [self._function_of(stage) for stage in plan.stages]
        check_capacity(self._capacities(Counter(names * plan.replicas)), lifetime_s=self._spec.lifetime_s, run_s=run_s)
        self._make_ready(set(names))

    def of_deployed_sizes(self) -> Self:
        """Return the same, whose specification has only the sizes that there are functions of, which are ready."""
        names = {size: self._name_of(size.name, size.memory_mb) for size in self._spec.sizes}
        sizes = tuple(size for size, name in names.items() if self._found(name) is not None)
        if not sizes:
            raise PlatformRefused(f"there are no functions of {self._deployment} in {self._region}; {self._remedy}")
        self._make_ready({names[size] for size in sizes})
        return self._with(replace(self._spec, sizes=sizes))

    def invoke(self, worker: Invocation) -> Handle:
        """Start a function and return at once; raises PlatformBusy, or PlatformRefused for what would not run there."""
        payload = payload_of(worker, self._spec, self.wrap_key)
        return Handle(worker=worker.worker, name=self._start(self._function_of(worker), payload))

    @abstractmethod
    def status(self, handle: Handle) -> Status:
        """Return the function's state, at most `polling.every_s` old, or the last one if the cloud does not answer."""

    def stop(self, handle: Handle) -> None:
        """End the function if it still runs; return when it has ended, or raise DeadlineExceeded."""
        if self.status(handle).state is not State.RUNNING:
            return
        late = f"{handle.name} has not ended {STOP_WITHIN_S:g} s after it was asked to"
        with self._asked_to_stop(handle) as addition:
            self._polling.await_end(lambda: self.status(handle), f"{late}{addition}")

    @cached_property
    def _key_wrap(self) -> KeyWrap:
        """The wrap by the deployment's secret: functions have it in their environment, clients ask the cloud for it."""
        if SECRET in os.environ:
            return wrap_of_environment()
        secret = next(filter(None, self._secrets()), None)
        if secret is None:
            raise PlatformRefused(f"no function of {self._deployment} in {self._region} has a secret; {self._remedy}")
        return KeyWrap(secret)

    @property
    def _remedy(self) -> str:
        return f"`funcpipe deploy {self.CLOUD} --sizes …` makes them"

    def _function_of(self, what: Stage | Invocation) -> str:
        return self._name_of(what.size, what.memory_mb)

    def _deploy(self, sizes: Iterable[str]) -> str:
        """Return the command that makes functions of these sizes."""
        where = f"--name {self._deployment} --region {self._region}"
        return f"run: funcpipe deploy {self.CLOUD} {where} --sizes {','.join(sizes)}"

    def _make_ready(self, functions: Set[str]) -> None:  # noqa: B027 - not all clouds let functions sleep
        """Return when the functions can be invoked."""

    @abstractmethod
    def _name_of(self, size: str, memory_mb: int) -> str:
        """Return the name of the function of a size."""

    @abstractmethod
    def _found(self, function: str) -> Any:
        """Return the cloud's description of a function; None where there is none."""

    @abstractmethod
    def _check_functions(self, plan: Plan) -> None:
        """Raise PlatformRefused for functions of `plan` that are not there, or not as planned."""

    @abstractmethod
    def _capacities(self, needed: Counter[str]) -> Iterator[Capacity]:
        """Yield the capacity of each function that has one of its own, and that of the account for all others."""

    @abstractmethod
    def _with(self, spec: PlatformSpec) -> Self:
        """Return the same platform with another specification."""

    @abstractmethod
    def _secrets(self) -> Iterator[str | None]:
        """Yield the secret of each function of the deployment, as far as it has one."""

    @abstractmethod
    def _start(self, function: str, payload: bytes) -> str:
        """Invoke a function; returns the name of its handle."""

    @abstractmethod
    def _asked_to_stop(self, handle: Handle) -> AbstractContextManager[str]:
        """Ask a function to end; within the context, which has words for one that does not, its end is awaited."""
