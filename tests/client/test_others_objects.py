"""Objects of others, below a run's name and beside it, are there with the same bytes whatever is done to the run."""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping

import pytest

from funcpipe.client.control.status import status
from funcpipe.client.control.stopping import clean, run_key, stop
from funcpipe.client.control.watching import Watcher
from funcpipe.client.follow.export import export
from funcpipe.client.follow.launch import launch, launch_detached
from funcpipe.client.follow.results import Progress
from funcpipe.client.prepare.prepared_run import PreparedRun, prepare
from funcpipe.client.prepare.session import Session, Site, session_on
from funcpipe.core import Halt, RunSettings
from funcpipe.core.settings import NO_LIMITS
from funcpipe.errors import InvalidValue, RunHalted, RunInterrupted, RunUnknown
from funcpipe.neighbours.parameter_server import on_functions as server_functions
from funcpipe.neighbours.parameter_server.on_functions import ServerFunctions, train_on_functions
from funcpipe.neighbours.parameter_server.training import ServerRun
from funcpipe.platforms.catalog import load_market
from funcpipe.runstate.functions import mark_detached
from funcpipe.runstate.generations import newest_record, reserve_generation
from funcpipe.runstate.halt import halt_run
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.owner import owned
from funcpipe.runstate.signing import signed
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform
from tests.client.held import HeldPlatform
from tests.client.threads import RUN, STEADY, smaller_job
from tests.runstate.strange import BELOW, strange

pytestmark = pytest.mark.usefixtures("traced")

EPOCHS = 2


def put_all(storage: MemoryStorage, objects: Mapping[str, bytes]) -> None:
    for key, data in objects.items():
        storage.put(key, data)


def left(storage: MemoryStorage) -> dict[str, bytes]:
    return {key: storage.get(key) for key in storage.list("")}


def prepared(
    storage: MemoryStorage, functions: ThreadPlatform, *, keep: bool = True, epochs: int = EPOCHS, **settings: object
) -> PreparedRun:
    job = dataclasses.replace(smaller_job(stages=2, replicas=1), epochs=epochs, prices=functions.spec)
    session = dataclasses.replace(session_on(Site(functions, storage, "memory://"), reopen=functions.open), lasts=keep)
    own = RunSettings(**({} if settings.keys() & {"resume", "name"} else {"name": RUN}), **settings)  # type: ignore[arg-type]
    return prepare(job, session, faults=dataclasses.replace(STEADY, keep=keep), settings=own)


def interrupt(progress: Progress) -> None:
    raise KeyboardInterrupt


class Clients:
    """A storage with functions; objects of others come once a run is prepared, as `train` refuses earlier ones."""

    def __init__(self, functions: HeldPlatform, storage: MemoryStorage) -> None:
        self.functions, self.storage = functions, storage

    def train(self, see: Callable[[Progress], None] = lambda progress: None, **settings: object) -> None:
        run = prepared(self.storage, self.functions, **settings)  # type: ignore[arg-type]
        put_all(self.storage, strange())
        launch(run, see)

    def interrupted(self, *, keep: bool = True) -> None:
        with pytest.raises(RunInterrupted):
            self.train(interrupt, keep=keep)

    def halted(self, *, keep: bool) -> None:
        def halt(progress: Progress) -> None:
            halt_run(signed(self.storage), Keys.of(newest_record(signed(self.storage), RUN)), Halt(reason="enough"))

        with pytest.raises(RunHalted):
            self.train(halt, keep=keep, epochs=10_000)

    def left_to_itself(self) -> None:
        run = prepared(self.storage, self.functions)
        put_all(self.storage, strange())
        launch_detached(run)

    def taken_over(self) -> None:
        """Another client takes the run over while it trains, and deletes it."""
        began, ended = threading.Event(), list[BaseException]()

        def first() -> None:
            try:
                self.train(lambda progress: began.set())
            except RunHalted as error:
                ended.append(error)

        self.functions.hold(2)
        thread = threading.Thread(target=first)
        thread.start()
        assert began.wait(60)
        clean(self.storage, RUN, self.functions.open, take_over=True)
        thread.join(60)
        assert len(ended) == 1

    def begun_by_a_client_that_died(self) -> None:
        """Of which the next client finds a generation without a record, and a mark."""
        run = prepared(self.storage, self.functions, keep_model=False)
        with owned(signed(self.storage), RUN) as owner:
            keys = reserve_generation(owner.storage, RUN)
            owner.storage.put(keys.bundle(0), b"1")
            mark_detached(owner.storage, keys, "")
            put_all(self.storage, strange())
        launch(run)


def resumed(clients: Clients) -> None:
    clients.interrupted()
    launch(prepared(clients.storage, clients.functions, resume=RUN, keep_model=False))


def collected(clients: Clients) -> None:
    clients.left_to_itself()
    launch(prepared(clients.storage, clients.functions, resume=RUN, keep_model=False))


def stopped_and_cleaned(clients: Clients) -> None:
    clients.left_to_itself()
    stop(clients.storage, RUN, clients.functions.open, wait_s=60.0)
    clean(clients.storage, RUN, clients.functions.open)


def read_and_cleaned(clients: Clients) -> None:
    clients.train()
    export(RUN, storage=clients.storage)
    status(clients.storage, RUN, clients.functions.open)
    run_key(clients.storage, RUN)
    Watcher(clients.storage, RUN, clients.functions.open).poll()
    clean(clients.storage, RUN, clients.functions.open)


ENDS: dict[str, Callable[[Clients], None]] = {
    "finished, nothing kept": lambda clients: clients.train(keep_model=False),
    "finished, read and cleaned": read_and_cleaned,
    "interrupted, not kept": lambda clients: clients.interrupted(keep=False),
    "halted, not kept": lambda clients: clients.halted(keep=False),
    "interrupted, resumed": resumed,
    "left to itself, collected": collected,
    "left to itself, stopped, cleaned": stopped_and_cleaned,
    "taken over": Clients.taken_over,
    "of a client that died": Clients.begun_by_a_client_that_died,
}


@pytest.mark.parametrize("end", ENDS)
def test_what_others_have_stays_however_a_run_ends_and_nothing_of_the_run_does(
    end: str, storage: MemoryStorage, functions: HeldPlatform, caplog: pytest.LogCaptureFixture
) -> None:
    ENDS[end](Clients(functions, storage))
    assert left(storage) == strange()
    said = [record.message for record in caplog.records if "that no run has written" in record.message]
    assert f"run {RUN}: leaves {len(BELOW)} objects, such as {RUN}/0, that no run has written" in said


def test_a_run_that_keeps_its_model_leaves_what_others_have_inside_its_folder(
    storage: MemoryStorage, functions: HeldPlatform
) -> None:
    inside: dict[str, bytes] = {}

    def add(progress: Progress) -> None:
        if not inside:
            prefix = Keys.of(newest_record(signed(storage), RUN)).prefix
            names = ("notes.txt", "stage/readme.md", "stage/s0.bundle.old", "own/leases/x", "checkpoints/best.pt")
            inside.update({f"{prefix}{name}": name.encode() for name in names})
            put_all(storage, inside)

    clients = Clients(functions, storage)
    clients.train(add)
    assert (strange() | inside).items() <= left(storage).items()
    clean(storage, RUN, functions.open)
    assert left(storage) == strange() | inside


def test_train_refuses_a_name_below_which_others_have_objects(storage: MemoryStorage, functions: HeldPlatform) -> None:
    storage.put("datasets/2024/images.bin", b"1")
    storage.put("datasets/2024/labels.bin", b"2")
    before = left(storage)
    with pytest.raises(
        InvalidValue,
        match=r"run must be a name of its own: 2 objects, such as datasets/2024/images\.bin, that no run has written",
    ):
        prepared(storage, functions, name="datasets")
    assert left(storage) == before


def test_clean_deletes_nothing_where_no_run_is(storage: MemoryStorage, functions: HeldPlatform) -> None:
    objects = {"datasets/2024/images.bin": b"1", "datasets/2024/labels.bin": b"2", "one/file": b"3"}
    put_all(storage, objects)
    told = "there is no run 'datasets' in this storage; 2 objects, such as datasets/2024/images.bin, lie there that no "
    with pytest.raises(RunUnknown, match=f"^{told}run has written, and nothing is deleted$"):
        clean(storage, "datasets", functions.open)
    with pytest.raises(RunUnknown, match="; the object one/file lies there that no run has written, and nothing"):
        clean(storage, "one", functions.open)
    with pytest.raises(RunUnknown, match=r"^there is no run 'none' in this storage$"):
        clean(storage, "none", functions.open)
    assert left(storage) == objects


def test_a_parameter_server_leaves_what_others_have(
    storage: MemoryStorage, functions: HeldPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(functions, storage, "memory://")

    @contextlib.contextmanager
    def opened(*_: object, **__: object) -> Iterator[Session]:
        session = session_on(site, reopen=functions.open)
        yield dataclasses.replace(session, lasts=True)

    monkeypatch.setattr(server_functions, "open_session", opened)
    job = smaller_job(stages=1, replicas=1)

    def train(name: str) -> None:
        run = ServerRun(
            global_batch=job.plan.global_batch,
            micro_batch=job.plan.micro_batch,
            save_every=1,
            watch=lambda group, done: put_all(storage, strange()),
        )
        settings = RunSettings(name=name, keep_model=False)
        train_on_functions(
            job, ServerFunctions(workers=1, memory_mb=512), run, settings, load_market("aws"), limits=NO_LIMITS
        )

    train(RUN)
    assert left(storage) == strange()
    with pytest.raises(InvalidValue, match=f"{len(BELOW)} objects, such as {RUN}/0, that no run has written"):
        train(RUN)
    assert left(storage) == strange()
