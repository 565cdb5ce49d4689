"""A platform whose functions are threads of this process: whole runs, with faults, in fractions of a second."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any

from funcpipe.core import (
    Invocation,
    Plan,
    PlatformSpec,
    RequestCounts,
    ServerFunctionSpec,
    WorkerSpec,
    from_text,
    to_text,
)
from funcpipe.core.logs import RawLine
from funcpipe.errors import FuncPipeError, PlatformError
from funcpipe.model.graph.isolation import in_turn
from funcpipe.neighbours.parameter_server.function_worker import run_function
from funcpipe.platforms.base import Cause, Handle, Invoked, PlainKeys, Platform, RequestMeter, State, Status, Storage
from funcpipe.platforms.wrappers import Counted, Retried
from funcpipe.runstate.keys import Keys
from funcpipe.testing.faults import FunctionFaults, FunctionStorage
from funcpipe.training.passes import Passes
from funcpipe.worker.attempt import run_attempt

_Spec = WorkerSpec | ServerFunctionSpec


@dataclass
class _Function:
    thread: threading.Thread | None
    faults: FunctionFaults
    clock: Callable[[], float]
    ended_well: bool | None = None
    invoked: Invoked = field(default_factory=Invoked)


class ThreadPlatform(PlainKeys):
    """A platform whose functions are threads of this process: runs that tests can disturb and look into.

    `faults_of` gives what goes wrong in the function of the nth invocation, and `clock_of` its clock; `lost` and
    `doubled` are the numbers of invocations that start no function, or two. The first functions of a generation, which
    start side by side, are numbered by stage and replica.
    """

    url = "threads://here"

    def __init__(
        self,
        spec: PlatformSpec,
        storage: Storage,
        *,
        faults_of: Callable[[int], FunctionFaults] = lambda number: FunctionFaults(),
        lost: frozenset[int] = frozenset(),
        doubled: frozenset[int] = frozenset(),
        clock_of: Callable[[int], Callable[[], float]] = lambda number: time.time,
    ) -> None:
        self.spec = spec
        self._clock_of = clock_of
        self._storage = storage
        self._faults_of = faults_of
        self._lost = lost
        self._doubled = doubled
        self._numbers, self._lock = count(), threading.Lock()
        self._first_numbers: dict[Keys, dict[int, int]] = {}
        self._functions: dict[str, _Function] = {}

    def check(self, plan: Plan, *, run_s: float | None = None) -> None:
        """Nothing: threads run any plan."""

    def open(self, url: str) -> Platform:
        """This platform, by its URL."""
        if url != self.url:
            raise PlatformError(f"there is no platform {url}")
        return self

    def invoke(self, worker: Invocation) -> Handle:
        """Start a function and return at once."""
        assert isinstance(worker, WorkerSpec | ServerFunctionSpec), "these functions only train"
        number = self._number(worker)
        if number in self._doubled:
            self._start(worker, _Function(None, FunctionFaults(), self._clock_of(number)), f"function {number} again")
        function = _Function(None, self._faults_of(number), self._clock_of(number))
        return self._start(worker, function, f"function {number}", lost=number in self._lost)

    def status(self, handle: Handle) -> Status:
        """The function's state; one whose invocation was lost seems to run."""
        function = self._functions[handle.name]
        if function.thread is None or (function.thread.is_alive() and not function.faults.dead.is_set()):
            return Status(state=State.RUNNING)
        if function.ended_well:
            return Status(state=State.DONE)
        return Status(state=State.FAILED, reason="killed by SIGKILL", cause=Cause.CRASHED)

    def stop(self, handle: Handle) -> None:
        """End the function if it still runs; return when it has ended."""
        function = self._functions[handle.name]
        function.faults.dead.set()
        function.faults.awake.set()
        if function.thread is not None:
            function.thread.join(timeout=60)
            if function.thread.is_alive():
                raise PlatformError(f"{handle.name} hangs")

    def logs(self, run: str) -> tuple[RawLine, ...]:
        """Nothing is kept of threads: their lines are the test's own."""
        return ()

    def detach(self) -> None:
        """Nothing: functions are threads of their client."""

    def meter_of(self, name: str) -> RequestMeter:
        """What counts the requests of the function of that name."""
        return self._functions[name].invoked.meter

    def counts_of(self, name: str) -> RequestCounts:
        """What the function of that name has asked of the storage."""
        return self.meter_of(name).counts

    def stop_all(self) -> None:
        """End all functions, at once, as the end of their machine would."""
        for function in self._functions.values():
            function.faults.dead.set()
            function.faults.awake.set()
        for name in list(self._functions):
            self.stop(Handle(worker="", name=name))

    def _number(self, worker: _Spec) -> int:
        with self._lock:
            if isinstance(worker, WorkerSpec) and worker.attempt == 0:
                generation = Keys.of(worker)  # other runs may have its nonce
                if generation not in self._first_numbers:
                    self._first_numbers[generation] = dict(enumerate(islice(self._numbers, worker.plan.workers)))
                left, place = self._first_numbers[generation], worker.stage * worker.plan.replicas + worker.replica
                return left.pop(place) if place in left else next(self._numbers)
            return next(self._numbers)

    def _start(self, worker: _Spec, function: _Function, name: str, *, lost: bool = False) -> Handle:
        spec: _Spec = from_text(type(worker), to_text(worker), source="the invocation payload")
        self._functions[name] = function
        if not lost:
            function.thread = threading.Thread(
                target=self._run, args=(spec, function), name=f"{name} {spec.worker}", daemon=True
            )
            function.thread.start()
        return Handle(worker=spec.worker, name=name)

    def _run(self, spec: _Spec, function: _Function) -> None:
        try:
            counted = Counted(FunctionStorage(self._storage, function.faults), function.invoked.meter)
            storage = Retried(counted, deadline_s=spec.message_deadline_s)
            if isinstance(spec, ServerFunctionSpec):
                function.ended_well = run_function(spec, storage, invoked=function.invoked)
                return
            function.ended_well = run_attempt(spec, storage, self.open, invoked=function.invoked, clock=function.clock)
        except FuncPipeError:
            function.ended_well = False  # it could not even say so


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Let one thread compute at a time, and none while a stage is loaded: functions that are threads share the random
    number generators, and torch.fx replaces methods of all modules while it loads a graph.
    """
    original = Passes._run

    def run(passes: Passes, *args: Any) -> None:
        with in_turn():
            original(passes, *args)

    Passes._run = run  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Passes._run = original  # type: ignore[method-assign]
