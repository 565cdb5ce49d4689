"""Two clients with the same run, on functions that are threads: one is refused or ended, and nothing is left over."""

import contextlib
import dataclasses
import threading
from collections.abc import Callable

import pytest
import torch

from funcpipe.client.control.stopping import clean, take_over
from funcpipe.client.follow.launch import launch, launch_detached, upload
from funcpipe.client.follow.results import Progress, RunResult
from funcpipe.client.prepare.prepared_run import PreparedRun, prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import Halt, RunSettings
from funcpipe.errors import RunHalted, RunInterrupted, RunTaken, RunUnknown
from funcpipe.platforms.base import State
from funcpipe.platforms.catalog import load_spec
from funcpipe.runstate.documents import put_document
from funcpipe.runstate.functions import start_function
from funcpipe.runstate.generations import list_generations, newest_record, reserve_generation, write_payload
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.owner import OwnerLease
from funcpipe.runstate.signing import signed
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform
from tests.client.held import HeldPlatform
from tests.client.threads import RUN, STEADY, job
from tests.examples import in_long_run

LONG = 10_000
SOME = 5
"""Steps of a run that two clients want: a checkpoint is there."""
TIMEOUT_S = 60.0

pytestmark = pytest.mark.usefixtures("traced")


def prepared(
    storage: MemoryStorage,
    functions: HeldPlatform,
    settings: RunSettings,
    *,
    epochs: int = LONG,
    keep: bool = True,
    heartbeat_s: float = STEADY.heartbeat_s,
) -> PreparedRun:
    own = dataclasses.replace(job(), epochs=epochs)
    session = session_on(Site(functions, storage, "memory://"), reopen=functions.open)
    return prepare(
        own, session, faults=dataclasses.replace(STEADY, keep=keep, heartbeat_s=heartbeat_s), settings=settings
    )


class Client:
    """A client in a thread, which has trained some steps when its context begins, and is interrupted when that ends.

    No more steps are done meanwhile.
    """

    def __init__(self, run: PreparedRun, functions: HeldPlatform) -> None:
        self._run, self._functions = run, functions
        self._until = run.first_step + SOME
        self._began, self._end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._train)
        self.error: BaseException | None = None
        self.result: RunResult | None = None

    def __enter__(self) -> "Client":
        self._functions.hold(self._until)
        self._thread.start()
        assert self._began.wait(TIMEOUT_S), self.error
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._functions.go_on()
        self.join()

    def join(self) -> None:
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()

    def _train(self) -> None:
        def tell(progress: Progress) -> None:
            if progress.step == self._until:
                self._began.set()
            if self._end.is_set():
                raise KeyboardInterrupt

        try:
            self.result = launch(self._run, tell)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error
            self._began.set()


def none_runs(functions: HeldPlatform) -> bool:
    return not any(thread.name.startswith("function ") for thread in threading.enumerate())


def stopped(storage: MemoryStorage, functions: HeldPlatform, *, epochs: int = LONG) -> None:
    """A run that was interrupted after a few steps, and can be resumed."""

    def interrupt(progress: Progress) -> None:
        if progress.step == SOME:
            raise KeyboardInterrupt

    functions.hold(SOME)
    with pytest.raises(RunInterrupted):
        launch(prepared(storage, functions, RunSettings(name=RUN), epochs=epochs), interrupt)
    functions.go_on()


def refused(run: PreparedRun) -> None:
    """Another client owns the run, and says so."""
    with pytest.raises(RunTaken, match=r"@.*, process \d+, since"):
        launch(run)


def test_of_two_starts_with_one_name_the_second_is_refused(storage: MemoryStorage, functions: HeldPlatform) -> None:
    both = [prepared(storage, functions, RunSettings(name=RUN), keep=False) for _ in range(2)]
    with Client(both[0], functions) as first:
        refused(both[1])
        assert len(list_generations(storage, RUN)) == 1
    assert isinstance(first.error, RunInterrupted)
    assert none_runs(functions)
    assert storage.list("") == ()


def test_a_start_that_was_prepared_before_another_began_and_ended_is_refused(
    storage: MemoryStorage, functions: HeldPlatform
) -> None:
    late = prepared(storage, functions, RunSettings(name=RUN))
    stopped(storage, functions)
    before = storage.list("")
    with pytest.raises(RunTaken, match="has begun or ended it since"):
        launch(late)
    assert set(before) <= set(storage.list(""))
    assert none_runs(functions)


def test_a_running_run_is_not_resumed_by_another_client(storage: MemoryStorage, functions: HeldPlatform) -> None:
    with Client(prepared(storage, functions, RunSettings(name=RUN)), functions) as first:
        refused(prepared(storage, functions, RunSettings(resume=RUN)))
        assert len(list_generations(storage, RUN)) == 1
    assert isinstance(first.error, RunInterrupted)
    assert none_runs(functions)


def test_of_two_that_resume_one_is_refused_and_no_generation_is_overtaken(
    storage: MemoryStorage, functions: HeldPlatform
) -> None:
    stopped(storage, functions)
    both = [prepared(storage, functions, RunSettings(resume=RUN)) for _ in range(2)]
    with Client(both[0], functions) as first:
        refused(both[1])
        assert [keys.generation for keys in list_generations(storage, RUN)] == [1]
    assert isinstance(first.error, RunInterrupted)
    with pytest.raises(RunTaken, match="has begun or ended it since"):
        launch(both[1])  # what it has read is not what is saved now
    assert none_runs(functions)


def test_a_run_that_another_client_trains_is_not_cleaned(storage: MemoryStorage, functions: HeldPlatform) -> None:
    stopped(storage, functions)
    with Client(prepared(storage, functions, RunSettings(resume=RUN)), functions) as first:
        with pytest.raises(RunTaken):
            clean(storage, RUN, functions.open)
        assert first.error is None
        assert newest_record(signed(storage), RUN).generation == 1
    assert clean(storage, RUN, functions.open) > 0
    assert storage.list("") == ()


def test_cleaning_can_take_over(storage: MemoryStorage, functions: HeldPlatform) -> None:
    with Client(prepared(storage, functions, RunSettings(name=RUN)), functions) as first:
        assert clean(storage, RUN, functions.open, take_over=True) > 0
        first.join()
    assert isinstance(first.error, RunHalted)
    assert "another client has taken it over" in str(first.error)
    assert none_runs(functions)
    assert storage.list("") == ()
    with pytest.raises(RunUnknown):
        clean(storage, RUN, functions.open, take_over=True)


@pytest.mark.parametrize("name", [True, *in_long_run([False])])
def test_whoever_takes_over_ends_the_first_client_and_goes_on_from_what_is_saved(
    storage: MemoryStorage, functions: HeldPlatform, name: bool
) -> None:
    settings = RunSettings(name=RUN, take_over=True) if name else RunSettings(resume=RUN, take_over=True)
    # workers hear of orders with each heartbeat
    with Client(prepared(storage, functions, RunSettings(name=RUN), heartbeat_s=0.05), functions) as first:
        functions.go_on()
        second = prepared(storage, functions, settings)
        first.join()
    assert isinstance(first.error, RunHalted)
    assert second.resumed is not None
    assert second.resumed.step > 0
    epochs = second.resumed.step // 3 + 2
    result = launch(dataclasses.replace(second, job=dataclasses.replace(second.job, epochs=epochs)))
    assert len(result.losses) == 3 * epochs
    assert none_runs(functions)
    assert storage.list("") == ()
    undisturbed = launch(prepared(storage, functions, RunSettings(name=RUN), epochs=epochs)).state_dict()
    assert all(torch.equal(tensor, undisturbed[name]) for name, tensor in result.state_dict().items())


def test_of_two_watchers_the_second_looks_on_and_takes_its_turn(
    storage: MemoryStorage, functions: HeldPlatform
) -> None:
    functions.hold(SOME)
    launch_detached(prepared(storage, functions, RunSettings(name=RUN)))
    seen: list[int] = []
    with contextlib.ExitStack() as second:
        with Client(prepared(storage, functions, RunSettings(resume=RUN)), functions) as first:
            other = Client(prepared(storage, functions, RunSettings(resume=RUN)), functions)
            second.enter_context(other)
            assert other.error is None
            seen += [worker.generation for worker in list_generations(storage, RUN)]
        assert isinstance(first.error, RunInterrupted)
        assert first.error.running
    assert isinstance(other.error, RunInterrupted)
    assert seen == [0]
    assert clean(storage, RUN, functions.open) > 0
    assert none_runs(functions)


def test_functions_and_objects_of_a_client_that_died_while_it_started_are_no_orphans(
    storage: MemoryStorage, functions: HeldPlatform
) -> None:
    dead = prepared(storage, functions, RunSettings(name=RUN))
    keys, begun = reserve_generation(signed(storage), RUN), []
    for spec in upload(dead, keys):
        write_payload(signed(storage), keys, spec)
        begun.append(start_function(functions, signed(storage), keys, spec))
    launch(prepared(storage, functions, RunSettings(name=RUN), epochs=2))
    assert all(functions.status(function.handle).state is not State.RUNNING for function in begun)
    assert storage.list("") == ()


class TakenOver(MemoryStorage):
    """A storage in which another client takes the run over as soon as its generations are looked for by an owner."""

    def list(self, prefix: str) -> tuple[str, ...]:
        found, keys = super().list(prefix), Keys(RUN)
        owners = super().list(keys.owner.owner_leases)
        if prefix in (keys.reservations, keys.run_prefix) and owners:
            OwnerLease(self, keys.owner, len(owners), fresh_s=1.0).take()
        return found


def cleaning(storage: MemoryStorage) -> None:
    clean(storage, RUN, ThreadPlatform(load_spec("local"), storage).open, take_over=True)


def taking_over(storage: MemoryStorage) -> None:
    take_over(storage, RUN, ThreadPlatform(load_spec("local"), storage).open)


@pytest.mark.parametrize("act", [cleaning, taking_over])
def test_who_loses_a_run_to_another_client_meanwhile_is_told_so(act: Callable[[MemoryStorage], None]) -> None:
    storage = TakenOver()
    keys = reserve_generation(signed(storage), RUN)
    put_document(signed(storage), keys.payload("s0.r0"), Halt(reason="an object of the run"))
    with pytest.raises(RunTaken, match="another client, which has taken it over"):
        act(storage)
