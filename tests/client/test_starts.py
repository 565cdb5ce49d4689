"""Functions of a run are started side by side, by a platform that may be busy; they are threads."""

import signal
import threading

import pytest

from funcpipe.client.control.stopping import clean
from funcpipe.client.follow.launch import launch, launch_detached
from funcpipe.core import Invocation, PlatformSpec, RunSettings, WorkerSpec
from funcpipe.errors import PlatformBusy, PlatformError, RunInterrupted
from funcpipe.platforms.base import Handle, State
from funcpipe.platforms.catalog import load_spec
from funcpipe.platforms.function_group import StartedFunction
from funcpipe.runstate import functions as run_functions
from funcpipe.runstate.documents import get_document
from funcpipe.runstate.generations import list_generations, newest_record
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.signing import signed
from funcpipe.testing.memory_storage import MemoryStorage
from tests.client.held import HeldPlatform
from tests.client.test_launch import EPOCHS, prepared
from tests.client.threads import RUN, job
from tests.support.waiting import LONG_S

pytestmark = pytest.mark.usefixtures("traced", "hasty")


class MeetingPlatform(HeldPlatform):
    """No function starts before all are being started."""

    def __init__(self, spec: PlatformSpec, storage: MemoryStorage, functions: int) -> None:
        super().__init__(spec, storage)
        self._all = threading.Barrier(functions, timeout=LONG_S)

    def invoke(self, worker: Invocation) -> Handle:
        """Start a function, with the others."""
        self._all.wait()
        return super().invoke(worker)


def test_functions_are_started_side_by_side(storage: MemoryStorage) -> None:
    functions = MeetingPlatform(load_spec("local"), storage, functions=job().plan.workers)
    result = launch(prepared(storage, functions, RunSettings(name=RUN)))
    assert len(result.losses) == 3 * EPOCHS


def test_handles_of_functions_that_are_started_together_are_one_object_and_each_its_own(
    storage: MemoryStorage, functions: HeldPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_functions, "MANY", 1)
    functions.hold(1)
    launch_detached(prepared(storage, functions, RunSettings(name=RUN)))
    own = signed(storage)
    keys = Keys.of(newest_record(own, RUN))
    together = get_document(own, run_functions.StartedTogether, keys.started_together).functions
    each = {key for key in storage.list(keys.functions) if key != keys.started_together}
    assert {keys.function(one.worker, one.attempt, one.token) for one in together} == each
    assert len(each) == job().plan.workers
    assert all(get_document(own, StartedFunction, keys.function(o.worker, o.attempt, o.token)) == o for o in together)
    functions.go_on()
    assert clean(storage, RUN, functions.open) > 0
    assert storage.list("") == ()
    assert all(functions.status(one.handle).state is not State.RUNNING for one in together)


class BusyPlatform(HeldPlatform):
    """One function is never started, as the platform is busy; then Ctrl-C comes, or another is `refused`."""

    refused = ""

    def __init__(self, spec: PlatformSpec, storage: MemoryStorage, *, until: int) -> None:
        super().__init__(spec, storage, until=until)
        self.started = list[Handle]()
        self._interrupted = False

    def invoke(self, worker: Invocation) -> Handle:
        """Start a function, or be busy."""
        assert isinstance(worker, WorkerSpec)
        if worker.worker == "s1.r0":
            if not self.refused and not self._interrupted:
                self._interrupted = True
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            raise PlatformBusy("as many functions run as the account allows")
        if worker.worker == self.refused:
            raise PlatformError("the function's code is too large")
        self.started.append(super().invoke(worker))
        return self.started[-1]


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(("refused", "message"), [("", "interrupted while training"), ("s0.r1", "code is too large")])
def test_nobody_waits_for_a_busy_platform_once_a_start_has_ended_otherwise(
    storage: MemoryStorage, refused: str, message: str
) -> None:
    functions = BusyPlatform(load_spec("local"), storage, until=0)
    functions.refused = refused
    with pytest.raises((RunInterrupted, PlatformError), match=message):
        launch(prepared(storage, functions, RunSettings(name=RUN)))
    assert all(functions.status(handle).state is not State.RUNNING for handle in functions.started)
    assert not list_generations(storage, RUN)
