"""Clients that meet at the storage of one run, for `tests.support.interleaving`.

They are the package's own: `launch`, `launch_detached`, `take_over` and `clean`, with all that these call. Only the
training is left out: a client that follows a run looks once whether it still owns it. Functions do nothing. They are
objects of a platform, which invoking puts, and stopping deletes:

    platform/client 1.0
"""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

from funcpipe.client.control.stopping import clean, take_over
from funcpipe.client.follow import functions as client_functions
from funcpipe.client.follow import launch as launching
from funcpipe.client.follow.launch import upload
from funcpipe.client.prepare.frozen import JobBase
from funcpipe.client.prepare.prepared_run import PreparedRun
from funcpipe.core import Invocation, Precision, RunAccount, RunLimits
from funcpipe.core.settings import DEFAULT_FAULTS
from funcpipe.errors import KeyMissing, RunUnknown
from funcpipe.platforms import function_group
from funcpipe.platforms.base import Handle, PlainKeys, Platform, State, Status, Storage
from funcpipe.platforms.catalog import LOCAL, load_spec
from funcpipe.runstate.generations import load_payload, newest_record, reserve_generation, write_payload, write_record
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.lease import Lease
from funcpipe.runstate.owner import Owner, OwnerLease, OwnerWatch
from funcpipe.runstate.resume import ResumePoint
from funcpipe.runstate.signing import SignedStorage, key_of, signed
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.worker.peer_recovery import PeerRecovery
from tests.support.actors import Actor, AskingStorage
from tests.support.races import PLAN as TWO_STAGES
from tests.support.run_keys import RememberedKeys, remembered_keys

RUN = "run"
PLATFORM = "platform/"
"""What the keys of running functions begin with."""

LEFT, DELETED = "left it to itself", "deleted it"
"""What becomes of a run by a client that ends well."""

NAP_S = 6.0
"""How long a client sleeps at least: who may be woken late may be woken as late as that."""

_PRICES = load_spec(LOCAL)
PLAN = replace(TWO_STAGES, stages=TWO_STAGES.stages[:1])
_ORDER = {"samples": 1, "epochs": 1, "steps": 1, "seed": 0, "shuffle": False, "drop_last": False}
_JOB = SimpleNamespace(
    plan=PLAN,
    prices=_PRICES,
    recipe=SimpleNamespace(
        clip_grad_norm=None,
        clip_grad_value=None,
        lr_schedule=None,
        averaged_by=None,
        taught_by=None,
        loss_over=None,
        precision=Precision.FP32,
    ),
    message_deadline_s=60.0,
    shards=None,
    **_ORDER,
)


class ClientStorage(AskingStorage):
    """The storage as a client opens it."""

    def __init__(self, actor: Actor) -> None:
        super().__init__(actor.ask)
        self.actor = actor


class Functions(PlainKeys):
    """A platform whose functions are objects."""

    url = "objects://"
    spec = _PRICES

    def __init__(self, storage: Storage, client: str) -> None:
        self._storage = storage
        self._client = client
        self._invoked = 0

    def open(self, url: str) -> Platform:
        """This platform."""
        return cast(Platform, self)

    def invoke(self, worker: Invocation) -> Handle:
        """Put a function."""
        name = f"{self._client}.{self._invoked}"
        self._invoked += 1
        self._storage.put(PLATFORM + name, worker.worker.encode())
        return Handle(worker=worker.worker, name=name)

    def status(self, handle: Handle) -> Status:
        """A function that is there runs."""
        try:
            self._storage.get(PLATFORM + handle.name)
        except KeyMissing:
            return Status(state=State.DONE)
        return Status(state=State.RUNNING)

    def stop(self, handle: Handle) -> None:
        """Delete a function."""
        self._storage.delete(PLATFORM + handle.name)

    def detach(self) -> None:
        """Functions run on anyway."""


def prepared_run(storage: Storage, name: str, *, resumed: ResumePoint | None = None, keep: bool = True) -> PreparedRun:
    """A run that the client `name` could begin; its record says so with the URL of the storage."""
    platform = Functions(storage, name)
    return PreparedRun(
        job=cast(Any, _JOB),
        name=RUN,
        platform=cast(Platform, platform),
        storage=storage,
        storage_url=f"memory://{name}",
        stages=cast(Any, (SimpleNamespace(bundle=b"code", tensors={}, base=JobBase()),)),
        data=cast(Any, SimpleNamespace(objects=lambda: ())),
        faults=replace(DEFAULT_FAULTS, keep=keep),
        limits=RunLimits(),
        account=RunAccount(),
        resumed=resumed,
        reopen=platform.open,
    )


@dataclass(frozen=True)
class Training:
    """A program: a client that starts the run, or resumes the generation `resumed`.

    It follows the run and deletes it, or leaves it to itself if it is to `detach`. With `takes_over` it first ends what
    another client does with the run.
    """

    resumed: Keys | None = None
    detach: bool = False
    takes_over: bool = False

    def __call__(self, actor: Actor) -> str:
        """Train, and say how that ended."""
        storage = signed(ClientStorage(actor))
        point = None if self.resumed is None else resume_point(self.resumed)
        if self.takes_over:
            take_over(storage, RUN, Functions(storage, f"{actor.name}, ending").open, wait_s=0.0)
            point = resumable(storage)
        prepared = prepared_run(storage, actor.name, resumed=point)
        if self.detach:
            launching.launch_detached(prepared)
            return LEFT
        launching.launch(prepared)
        return DELETED


def resume_point(keys: Keys) -> ResumePoint:
    """The beginning of a generation that has saved nothing."""
    return ResumePoint(keys=keys, step=0, state=None, losses=())


def resumable(storage: Storage) -> ResumePoint | None:
    """Where the run would be resumed, if it has begun."""
    try:
        return resume_point(Keys.of(newest_record(storage, RUN)))
    except RunUnknown:
        return None


@dataclass(frozen=True)
class Cleaning:
    """A program: a client that deletes the run."""

    takes_over: bool = False

    def __call__(self, actor: Actor) -> str:
        """Delete the run."""
        storage = ClientStorage(actor)
        clean(storage, RUN, Functions(storage, actor.name).open, take_over=self.takes_over)
        return DELETED


@dataclass(frozen=True)
class Restarting:
    """A program: a watchdog that finds the worker of the generation `keys` silent."""

    keys: Keys

    def __call__(self, actor: Actor) -> str:
        """Restart the worker."""
        storage, times = signed(ClientStorage(actor)), itertools.chain([0.0, 0.0], itertools.repeat(1e6))
        spec = load_payload(storage, self.keys, "s0.r0", key_of(RememberedKeys(), self.keys))
        functions = Functions(storage, actor.name)
        recovery = PeerRecovery(spec, storage, self.keys, functions.open, is_worker=False, clock=lambda: next(times))
        for _ in range(2):
            recovery.check({spec.worker}, step=0, account=RunAccount())
        return "restarted it"


def stopped() -> tuple[Keys, dict[str, bytes]]:
    """The generation of a run that was stopped, and what is left of it in the storage; nobody owns it."""
    objects = MemoryStorage()
    storage = signed(objects)
    with remembered_keys(), Owner(storage, RUN, 0, every_s=60.0, watches=False) as owner:
        owner.take()
        prepared = prepared_run(storage, "before")
        keys = reserve_generation(owner.storage, RUN)
        for spec in upload(prepared, keys):
            write_payload(storage, keys, spec)
        write_record(storage, keys, launching._record(prepared, keys))
    return keys, {key: objects.get(key) for key in objects.list("")}


class _OneByOne:
    """A pool that has no threads."""

    def __init__(self, _: int) -> None:
        pass

    def __enter__(self) -> "_OneByOne":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def map(self, function: Callable[[Any], object], values: Iterable[Any]) -> list[object]:
        return [function(value) for value in values]


class _AfterOneBeat:
    """In place of the event that ends the thread of an owner."""

    def __init__(self) -> None:
        self._beats = 0

    def wait(self, every_s: float) -> bool:
        self._beats += 1
        return self._beats > 1

    def set(self) -> None:
        pass


def _begin_beating(owner: Owner) -> Owner:
    """Start an actor in place of the thread of an owner."""
    actor = _actor(owner)

    def beats(other: Actor) -> None:
        storage = ClientStorage(other)
        twin = Owner(storage, RUN, owner.attempt, every_s=2.0, watches=False)
        twin._lease.token, twin._key, twin._document = owner._lease.token, owner._key, owner._document
        twin._lease.taken = True
        twin._stop = cast(threading.Event, _AfterOneBeat())
        twin._run()

    actor.start(_beating(owner), beats)
    return owner


def _actor(owner: Owner) -> Actor:
    return cast(ClientStorage, cast(SignedStorage, owner._raw)._store).actor


def _beating(owner: Owner) -> str:
    return f"{_actor(owner).name}, beating as owner {owner.attempt}"


def _end_beating(owner: Owner) -> None:
    if not owner._stop.is_set():
        owner._stop.set()
        _actor(owner).kill(_beating(owner))


def _follow(_: object, __: object, ___: object, ____: object, owner: Owner) -> None:
    time.sleep(NAP_S)
    owner.check_now()


@contextlib.contextmanager
def clients(*, beating: bool = False) -> Iterator[None]:
    """Meanwhile clients have no threads, and keep neither logs nor, but in memory, keys of runs.

    The threads of `beating` owners are actors, who say something once.

    The world's time passes for leases too, and nobody sleeps shorter than `NAP_S`.
    """
    clock, sleep = time.monotonic, time.sleep
    with contextlib.ExitStack() as stack:
        stack.enter_context(remembered_keys())
        for made in (Lease, OwnerLease, OwnerWatch):
            stack.enter_context(mock.patch.dict(cast(Any, made.__init__).__kwdefaults__, clock=clock))
        for where, name, value in (
            (time, "sleep", lambda seconds: sleep(max(seconds, NAP_S))),
            (function_group, "ThreadPoolExecutor", _OneByOne),
            (client_functions, "_LEAVING_S", NAP_S),
            (launching, "keep_client_log", lambda _: contextlib.nullcontext()),
            (launching, "follow", _follow),
            (launching, "billed", lambda _, result: result),
            (Owner, "__enter__", _begin_beating if beating else lambda owner: owner),
            (Owner, "_end_thread", _end_beating if beating else lambda owner: None),
        ):
            stack.enter_context(mock.patch.object(where, name, value))
        yield
