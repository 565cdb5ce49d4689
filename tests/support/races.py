"""Scenarios in which functions and clients of a run meet at its storage, for `tests.support.interleaving`.

The actors run the package's own code for leases, checkpoints, messages, hand-over and clients. Only the training is
replaced: a stage is one number, which each step changes, so that every message and checkpoint has known bytes.
"""

import functools
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from funcpipe.core import Outcome, Plan, RunAccount, ScheduleKind, Stage, Sync, Wire, WorkerId, WorkerSpec, worker_name
from funcpipe.errors import KeyMissing
from funcpipe.platforms.base import Handle, Invoked, Platform, Storage
from funcpipe.runstate.checkpoints import Checkpoints
from funcpipe.runstate.generations import write_payload
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.lease import FencedStorage, Lease
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.training.device import HOST
from funcpipe.training.state import StageState
from funcpipe.worker.attempt import Attempt
from funcpipe.worker.checkpoint_manager import CheckpointManager
from funcpipe.worker.hand_over import Successor, await_predecessor
from funcpipe.worker.heartbeat import HaltOrders
from funcpipe.worker.peer_recovery import PeerRecovery
from funcpipe.worker.step_graph import StepMessages
from tests.support.actors import Actor
from tests.support.run_keys import NONCE, RUN_KEY, signed_for_tests

KEYS = Keys("run", 0, NONCE)
STEPS = 3
FIRST, SECOND = (0, 0), (1, 0)
"""The two workers: the first sends a message in each step, and the second reads it."""

FRESH_S = 10.0

PLAN = Plan(
    global_batch=1,
    micro_batch=1,
    replicas=1,
    schedule=ScheduleKind.GPIPE,
    sync=Sync.PIPELINED,
    wire=Wire.FP32,
    platform="local",
    stages=tuple(Stage(first=n, stop=n + 1, size="1024MB", memory_mb=1024, layers=(f"l{n}",)) for n in range(2)),
)


def spec_of(worker: WorkerId, attempt: int) -> WorkerSpec:
    """The payload of an attempt."""
    return WorkerSpec(
        run=KEYS.run,
        attempt=attempt,
        stage=worker[0],
        replica=worker[1],
        plan=PLAN,
        storage="memory://",
        platform="actors://",
        bundle="b",
        bundle_sha256="0",
        parameters="p",
        epochs=1,
        seed=0,
        message_deadline_s=60.0,
        nonce=KEYS.nonce,
        run_key=RUN_KEY.text,
    )


def value_after(step: int) -> int:
    """The number that a stage has learned after `step` steps."""
    return functools.reduce(lambda value, number: 3 * value + number, range(1, step + 1), 1)


def message(step: int) -> str:
    """The key of the first worker's message of `step`."""
    return KEYS.message(worker_name(*FIRST), step, f"put-activation.{worker_name(*FIRST)}.m0.k0")


def messages_of(worker: WorkerId, step: int) -> StepMessages:
    """What `worker` puts in `step`. The first depends on the second, as if that sent gradients back."""
    if worker == SECOND:
        return StepMessages(readers={}, upstream=frozenset({FIRST}))
    return StepMessages(readers={message(step): frozenset({SECOND})}, upstream=frozenset({SECOND}))


class Learned:
    """What a checkpoint manager takes for the computation of a stage."""

    device = HOST
    has_own_optimizer = False
    saves_part = False

    def __init__(self) -> None:
        self.value = value_after(0)

    def check_finite(self) -> None:
        """Nothing: a whole number is finite."""

    def begin_state(self) -> AbstractContextManager[StageState]:
        """Give the number, as the state of a stage."""
        return nullcontext(state_of(self.value))

    def restore(self, state: StageState) -> None:
        """Go on from `state`."""
        self.value = value_in(state)


def state_of(value: int) -> StageState:
    """A stage that has learned `value`."""
    tensors = {"model/w": torch.tensor([value])}
    return StageState(tensors=tensors, aliases={}, transient=frozenset(), settings={"optimizer": {}, "loss_scale": {}})


def value_in(state: StageState) -> int:
    """What a stage has learned."""
    return int(state.tensors["model/w"].item())


class _EveryStep:
    """An interval of checkpoints: one after each step."""

    def steps(self) -> int:
        """After how many steps a checkpoint is due."""
        return 1

    def begin_checkpoint(self) -> None:
        """Nothing is learned from it."""

    def record_cost(self, _: float) -> None:
        """Nothing is learned from it."""


def save(storage: Storage, worker: WorkerId, step: int, writer: str = "before") -> None:
    """Save the stage of `worker` after `step` steps, as an attempt before has done."""
    checkpoints = Checkpoints(storage, KEYS)
    checkpoints.save(worker[0], step, state_of(value_after(step)), writer=writer)
    checkpoints.mark_done(worker, step)


@dataclass(frozen=True)
class Function:
    """A program: one attempt of `worker`, which ends after `steps` steps of the run.

    `fence` and `lease` make what guards it: mistakes are planted there.
    """

    worker: WorkerId
    attempt: int
    steps: int = STEPS
    fence: Callable[[Storage, Lease], Storage] = FencedStorage
    lease: Callable[..., Lease] = Lease
    checkpoints: Callable[..., Checkpoints] = Checkpoints
    reports: bool = False
    waits: bool = False

    def __call__(self, actor: Actor) -> str:
        """Become the worker, train, and end or hand over."""
        spec = replace(spec_of(self.worker, self.attempt), follows_within_s=60.0 if self.waits else None)
        own = signed_for_tests(actor.storage)
        if self.waits:
            await_predecessor(spec, own, KEYS)
        lease = self.lease(own, KEYS, spec.worker, self.attempt, fresh_s=FRESH_S, clock=actor.clock)
        lease.take()
        storage = self.fence(own, lease)
        learned = Learned()
        manager = CheckpointManager(
            spec, storage, KEYS, lease=lease, computation=cast(Any, learned), interval=cast(Any, _EveryStep()), steps=9
        )
        manager._checkpoints = self.checkpoints(storage, KEYS, attempt=self.attempt)
        done = manager.restore(lambda step: messages_of(self.worker, step))
        while done < self.steps:
            learned.value = 3 * learned.value + done + 1
            if self.worker == FIRST:
                storage.put(message(done), str(learned.value).encode())
            else:
                read_message(storage, done, lease)
            manager.record_messages(done, messages_of(self.worker, done))
            done += 1
            manager.after_step(done, lambda work: work())
        if self.reports:
            reporter = Attempt(spec, own, lease, Invoked(), lambda: 0.0)
            reporter.report(Outcome.FINISHED, None)
        return f"finished {done}"


def read_message(storage: Storage, step: int, lease: Lease) -> None:
    """Read the message of `step`, whose sender has put it before; raises Superseded if only a successor needs it."""
    try:
        storage.get(message(step))
    except KeyMissing:
        lease.check_now()
        raise AssertionError(f"the message of step {step} is needed, and gone") from None


def collector(actor: Actor) -> None:
    """The first worker after its last step: it deletes what nobody needs any more."""
    computation, interval, storage = cast(Any, Learned()), cast(Any, _EveryStep()), signed_for_tests(actor.storage)
    lease = Lease(storage, KEYS, worker_name(*FIRST), 0, fresh_s=FRESH_S, clock=actor.clock)
    manager = CheckpointManager(
        spec_of(FIRST, 0), storage, KEYS, lease=lease, computation=computation, interval=interval, steps=STEPS
    )
    for step in range(STEPS):
        manager.record_messages(step, messages_of(FIRST, step))
    manager.after_step(STEPS, lambda work: work())


def publishing_late(actor: Actor) -> None:
    """Another replica of the second stage, which has written its checkpoint of step 3 and publishes it only now."""
    checkpoints = Checkpoints(signed_for_tests(actor.storage), KEYS)
    checkpoints.save(SECOND[0], STEPS, state_of(value_after(STEPS)), writer="s1.r1.a00000000")


def handing_over(actor: Actor) -> str:
    """The first attempt of the first worker: it does a step, saves the stage, and hands over."""
    spec, own = spec_of(FIRST, 0), signed_for_tests(actor.storage)
    lease = Lease(own, KEYS, spec.worker, 0, fresh_s=FRESH_S, clock=actor.clock)
    lease.take()
    storage = FencedStorage(own, lease)
    storage.put(message(1), str(value_after(2)).encode())
    lease.check_now()
    save(storage, FIRST, 2, writer="s0.r0.a00000000")
    successor = Successor(spec, storage, KEYS, cast(Any, None), cast(Any, None), lifetime_s=None)
    successor.hand_over(2)
    return "handed over"


class _Starting:
    """A platform whose functions are actors."""

    url = "actors://"

    def __init__(self, actor: Actor) -> None:
        self._actor = actor

    def open(self, url: str) -> Platform:
        return cast(Platform, self)

    def invoke(self, worker: Any) -> Handle:
        function = Function((worker.stage, worker.replica), worker.attempt, 3, reports=True)
        name = f"attempt {worker.attempt} by {self._actor.name}"
        self._actor.start(name, function)
        return Handle(worker=worker.worker, name=name)


def peer(actor: Actor) -> None:
    """The second worker, which has not heard of the first for too long."""
    times = itertools.chain([0.0, 0.0], itertools.repeat(1e6))
    storage = signed_for_tests(actor.storage)
    peers = PeerRecovery(spec_of(SECOND, 0), storage, KEYS, _Starting(actor).open, clock=lambda: next(times))
    for _ in range(2):
        peers.check({worker_name(*FIRST)}, step=1, account=RunAccount())


@dataclass(frozen=True)
class Failing:
    """A program: an attempt of the first worker whose code raises."""

    attempt: int
    lease: Callable[..., Lease] = Lease

    def __call__(self, actor: Actor) -> str:
        """Become the worker, fail, and say so."""
        spec, storage = spec_of(FIRST, self.attempt), signed_for_tests(actor.storage)
        lease = self.lease(storage, KEYS, spec.worker, self.attempt, fresh_s=FRESH_S, clock=actor.clock)
        lease.take()
        reporter = Attempt(spec, storage, lease, Invoked(), lambda: 0.0)
        reporter.report(Outcome.FAILED, ValueError("the loss fails"))
        return "ended the run"


def obeying(actor: Actor) -> str:
    """The second worker: it looks for orders to end the run, and obeys."""
    storage = signed_for_tests(actor.storage)
    lease = Lease(storage, KEYS, worker_name(*SECOND), 0, fresh_s=FRESH_S, clock=actor.clock)
    orders = HaltOrders(storage, KEYS, lease, notice_steps=lambda: 1)
    return "goes on" if orders.poll() is None else "obeys"


def objects(*written: Callable[[Storage], None]) -> dict[str, bytes]:
    """What a storage holds into which all of `written` have written."""
    storage = MemoryStorage()
    for write in written:
        write(signed_for_tests(storage))
    return {key: storage.get(key) for key in storage.list("")}


def trained(first: int, second: int, marked: int = 0) -> dict[str, bytes]:
    """What is there after the workers have done so many steps and saved each, and nothing was deleted.

    The second has done, but not saved, `marked` steps if that is more.
    """

    def write(storage: Storage) -> None:
        for step in range(first):
            storage.put(message(step), str(value_after(step + 1)).encode())
            save(storage, FIRST, step + 1)
        for step in range(second):
            save(storage, SECOND, step + 1)
        if marked:
            Checkpoints(storage, KEYS).mark_done(SECOND, marked)
        for worker in (FIRST, SECOND):
            write_payload(storage, KEYS, spec_of(worker, 0))

    return objects(write)
