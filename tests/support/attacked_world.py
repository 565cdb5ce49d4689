"""A storage under attack with functions that are threads, and what clients do there: for runs in `attacks`."""

import contextlib
import functools
import os
import random
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from funcpipe.client.control.status import status
from funcpipe.client.control.stopping import clean, stop
from funcpipe.client.follow.launch import launch
from funcpipe.client.follow.results import RunResult
from funcpipe.client.prepare.job import Job
from funcpipe.client.prepare.prepared_run import prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import FaultTolerance, RunSettings
from funcpipe.errors import FuncPipeError
from funcpipe.platforms.base import Storage
from funcpipe.platforms.catalog import load_spec, open_storage
from funcpipe.platforms.wrappers import Retried
from funcpipe.runstate.signing import FOLDER
from funcpipe.testing.faults import FunctionFaults, FunctionStorage
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform
from tests.support import chaos
from tests.support.advice import Left, Wrong, other_acts
from tests.support.hostile_storage import HostileStorage, Hostility
from tests.support.plans import even_stages

RUN, STAGES = "digits", 2
DEADLINE_S = 60.0
FAULTS = FaultTolerance(heartbeat_s=0.05, lease_s=1.0, start_s=2.0, checkpoint_steps=2, retained_objects=4, keep=True)

BESIDE = (f"{RUN}-2/generations/0000", f"{RUN}0/run.json", "other/x", f"_watch/{RUN}/notes")
BELOW = ("2024/images.bin", "run.json", "generations/README", "owner/leases/mine", "g0000-xyz/run.json", "server")
"""What others have beside a run, and below its name."""

TORN = (
    *("/reports/", "/reports/", "/heartbeats/", "/checkpoints/", "/progress/", "/steps/", "/losses/", "/traces/"),
    *("/messages/", "/generations/", "/run.json", "/payloads/", "/leases/", "/functions/", "/stage/", "/data/"),
    *("/owner/", "/finished.json", ".safetensors"),
)
"""Parts of the keys of objects that are torn."""

REQUESTS = 900
"""About so many requests are made in a run; attacks come before."""

ENDS_WITHIN_S = 30.0
"""So long may threads take to end on a machine that is busy."""

CLIENT_REQUESTS = 200
"""About so many requests does a client make in a run."""


class Sleeper(FunctionFaults):
    """Nothing goes wrong in a client but that all its threads stand still at a request, until it is woken."""

    def __init__(self, at: int | None) -> None:
        super().__init__(sleeps_at=None)
        self._at = at
        self.asleep = threading.Event()

    def next(self, written: str = "") -> int:
        """Count a request, and stand still if it is the one."""
        with self.lock:
            self.requests += 1
            if self.requests == self._at:
                self.awake.clear()
                self.asleep.set()
            number = self.requests
        self.awake.wait()
        return number


@functools.cache
def jobs(replicas: int) -> tuple[Job, Job]:
    """The job, for each of two clients: models are traced before threads draw random numbers."""
    made = tuple(chaos.job(DEADLINE_S) for _ in range(2))
    stages = even_stages([layer.name for layer in made[0].graph.layers], STAGES)
    one, other = (replace(job, plan=replace(job.plan, replicas=replicas, stages=stages)) for job in made)
    return one, other


@dataclass
class World:
    """A storage, functions that are threads, and clients of a run there that is called `name`.

    `errors` are what clients were told, and `did` what was done because of that, or by another client. `folder` holds
    the files that a run may leave.
    """

    draw: random.Random
    replicas: int
    hostility: Hostility
    folder: Path
    keeps_model: bool = False
    deadline_s: float = DEADLINE_S
    name: str = RUN
    did: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    has_folder: bool = True

    def __post_init__(self) -> None:
        self.storage = HostileStorage(MemoryStorage(), self.hostility)
        self.threads = set(threading.enumerate())
        self.platform = ThreadPlatform(load_spec("local"), self.storage)

    def client(self, sleeper: Sleeper | None = None) -> Storage:
        """The storage as one client sees it."""
        seen = self.storage if sleeper is None else FunctionStorage(self.storage, sleeper)
        return Retried(seen, deadline_s=self.deadline_s)

    def train(self, settings: RunSettings, *, sleeper: Sleeper | None = None) -> RunResult:
        """Train, resume or collect the run, as a client that sleeps, or as another one."""
        job = replace(
            jobs(self.replicas)[sleeper is None], message_deadline_s=self.deadline_s, prices=self.platform.spec
        )
        session = session_on(Site(self.platform, self.client(sleeper), "memory://here"), reopen=self.platform.open)
        session = replace(session, lasts=self.keeps_model)
        settings = replace(settings, keep_model=self.keeps_model)
        return launch(prepare(job, session, faults=FAULTS, settings=settings))

    @property
    def happened(self) -> set[str]:
        """What the storage, and the folders, have done to the run."""
        return self.storage.happened

    def becomes(self, **changes: Any) -> None:
        """Let the storage do some of it otherwise from now on; `has_folder` is whether it has a place."""
        self.has_folder = changes.pop("has_folder", self.has_folder)
        self.storage.becomes(**changes)

    def heal(self) -> None:
        """Let the storage do what it should from now on, and clients wait for long."""
        self.deadline_s = DEADLINE_S
        self.storage.heal()

    def own(self) -> list[str]:
        """The keys of all objects but those of others."""
        return self.storage.own()

    def begin(self, *, sleeper: Sleeper | None = None) -> RunResult:
        """Train a new run."""
        if not self.has_folder:
            self.happened.add("no folder")
            open_storage((self.folder / "file" / "objects").as_uri())
        return self.train(RunSettings(name=self.name), sleeper=sleeper)

    def resume(self, *, take_over: bool = False, from_start: bool = False) -> RunResult:
        """Go on with the run, watch it, or collect it."""
        return self.train(RunSettings(resume=self.name, take_over=take_over, from_start=from_start))

    def clean(self, *, take_over: bool = False) -> None:
        """Delete the run."""
        clean(self.client(), self.name, self.platform.open, take_over=take_over)

    def stop(self) -> None:
        """End the run after a step."""
        stop(self.client(), self.name, self.platform.open, wait_s=1.0)

    def status(self) -> None:
        """Ask how the run is."""
        status(self.client(), self.name, self.platform.open)

    def set_keys(self) -> None:
        """Keep keys in a folder that can be written."""
        os.environ[FOLDER] = str(self.folder / "keys")

    def lose_keys(self) -> None:
        """Delete all keys that this machine has kept."""
        for path in (self.folder / "keys").glob("*"):
            path.unlink(missing_ok=True)
            self.happened.add("lost keys")

    def let_happen(self, attacks: Collection[str]) -> None:
        """Let others have objects, and let happen what comes at some request, of `attacks` by name."""
        self.storage.put_of_others({key: f"of others: {key}".encode() for key in BESIDE})
        below = {f"{RUN}/{key}": f"of others: {key}".encode() for key in BELOW}
        if "BELOW" in attacks:
            self.storage.put_of_others(below)
        moments: dict[str, Callable[[], None]] = {
            "LATER": lambda: self.storage.put_of_others(below),
            "KEYS_LOST": self.lose_keys,
            "STOPPED": lambda: threading.Thread(target=self._stop_by_other).start(),
        }
        for attack in [name for name in moments if name in attacks]:
            self.storage.at_request(self.draw.randrange(20, REQUESTS), moments[attack])

    def check_left(self) -> None:
        """Raise Wrong if of others anything was touched, or if of the run anything is left besides its objects."""
        if touched := self.storage.lost_of_others():
            raise Wrong(f"of others is touched: {touched}")
        kinds = ("tmp",) if "let objects expire" in self.happened else ("keys", "tmp")  # nobody sees a run vanish
        if files := [path.name for kind in kinds for path in (self.folder / kind).glob("*")]:
            raise Wrong(f"files are left: {files}")
        self.platform.stop_all()
        until_s = time.monotonic() + ENDS_WITHIN_S
        while (running := set(threading.enumerate()) - self.threads) and time.monotonic() < until_s:
            time.sleep(0.01)
        if running:
            raise Wrong(f"threads are left: {sorted(thread.name for thread in running)}")

    def _stop_by_other(self) -> None:
        self.did.append("another: stop")
        with contextlib.suppress(FuncPipeError):  # as the run may not have begun, or has ended
            self.stop()

    def slept(self, note: Callable[[FuncPipeError], None]) -> Left:
        """Train with a client that stands still at some request, while another one does something to the run."""
        sleeper, ended = Sleeper(self.draw.randrange(1, CLIENT_REQUESTS)), list[RunResult | FuncPipeError]()

        def train() -> None:
            try:
                ended.append(self.begin(sleeper=sleeper))
            except FuncPipeError as error:
                ended.append(error)

        thread = threading.Thread(target=train)
        thread.start()
        while thread.is_alive() and not sleeper.asleep.wait(0.02):
            pass
        result = other_acts(self, note) if sleeper.asleep.is_set() else None
        sleeper.awake.set()
        thread.join(4 * DEADLINE_S)
        if not ended:
            raise Wrong("a client that was woken does not end")
        if isinstance(ended[0], RunResult):
            return ended[0]
        if result is None:
            raise ended[0]
        note(ended[0])
        return result
