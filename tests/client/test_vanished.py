"""Objects of a run that vanish, as by their age: what is said is true, and checkpoints alone are enough to go on."""

import math
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from funcpipe.client.control.status import status
from funcpipe.client.control.stopping import clean, run_key, stop
from funcpipe.client.control.verdict import Verdict
from funcpipe.client.follow.export import load_saved
from funcpipe.client.follow.launch import launch
from funcpipe.client.follow.results import Progress, RunResult
from funcpipe.client.prepare.job import Job
from funcpipe.client.prepare.prepared_run import prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import RunSettings
from funcpipe.core.settings import WHY_GONE
from funcpipe.errors import RunHalted, RunUnknown, Superseded
from funcpipe.platforms.catalog import load_spec
from funcpipe.runstate.generations import list_generations, newest_record, refuse_if_gone, write_record
from funcpipe.runstate.keys import Keys, generation_of
from funcpipe.runstate.lease import FencedStorage, Lease
from funcpipe.runstate.owner import Owner, owned, raise_if_taken
from funcpipe.runstate.reader import RunReader
from funcpipe.runstate.resume import load_resume_point
from funcpipe.runstate.signing import signed
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform
from funcpipe.training.state import StageState
from funcpipe.worker import checkpoint_manager
from tests.client.held import HeldPlatform
from tests.client.threads import STEADY, smaller_job
from tests.examples import in_long_run
from tests.run_documents import RECORD
from tests.runstate.test_damage import FAULTS, RUN, filled, gone, job, states, stopped
from tests.support import races
from tests.support.census import below_generation
from tests.support.run_keys import signed_for_tests
from tests.worker.test_checkpoint_costs import EVERY, Recorded, manager_on

__all__ = ["job", "stopped"]  # fixtures


def without(objects: dict[str, bytes], lost: Callable[[str], bool]) -> MemoryStorage:
    return filled({key: data for key, data in objects.items() if not lost(key)})


def resumed(storage: MemoryStorage, job: Job) -> RunResult:
    functions = ThreadPlatform(load_spec("local"), storage)
    session = session_on(Site(functions, storage, "memory://"), reopen=gone)
    return launch(prepare(job, session, faults=FAULTS, settings=RunSettings(resume=RUN)))


def assert_same(found: RunResult, expected: RunResult) -> None:
    assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in found.state_dict().items())


def test_checkpoints_alone_are_enough_to_go_on_with_the_same_bits(job: Job, stopped: dict[str, bytes]) -> None:
    plain = MemoryStorage()
    site = Site(ThreadPlatform(load_spec("local"), plain), plain, "memory://")
    expected = launch(prepare(job, session_on(site), faults=FAULTS, settings=RunSettings(name=RUN)))
    storage = without(stopped, lambda key: "/checkpoints/" not in key)
    told = status(storage, RUN, gone, pause=lambda s: None)
    assert (told.verdict, told.saved_step) == (Verdict.DEAD, 6)
    assert load_saved(RUN, storage=storage).step == 6
    assert run_key(storage, RUN).text
    result = resumed(storage, job)
    assert_same(result, expected)
    assert [math.isnan(loss) for loss in result.losses] == [True] * 6 + [False] * 3
    assert result.losses[6:] == expected.losses[6:]
    assert storage.list("") == ()


def folder(key: str) -> str:
    return below_generation(key)[0]


def test_whatever_vanishes_besides_checkpoints_the_run_goes_on_where_it_was_saved(stopped: dict[str, bytes]) -> None:
    """Any kind of objects, and any two of the record, its copies and the reservation."""
    expected, keys = states(stopped)[6], generation_of(next(key for key in stopped if key.endswith("/run.json")))
    assert keys is not None
    known = (keys.reservation, *keys.records)
    groups = [[key for key in stopped if folder(key) == kind] for kind in {*map(folder, stopped)} - {"checkpoints"}]
    for lost in (*groups, *([one, other] for one in known for other in known), [keys.reservation, *keys.records[:2]]):
        storage = signed(without(stopped, set(lost).__contains__))
        point = load_resume_point(storage, newest_record(storage, RUN))
        assert point.step == 6, lost
        assert point.state is not None
        assert all(torch.equal(tensor, expected[name]) for name, tensor in point.state.tensors.items())


def test_a_generation_that_has_lost_its_reservation_is_followed_by_the_next_number(
    job: Job, stopped: dict[str, bytes]
) -> None:
    storage = without(stopped, lambda key: "/generations/" in key)
    seen = []
    functions = ThreadPlatform(load_spec("local"), storage)
    session = session_on(Site(functions, storage, "memory://"), reopen=gone)
    prepared = prepare(job, session, faults=FAULTS, settings=RunSettings(resume=RUN))
    launch(prepared, lambda progress: seen.append([keys.generation for keys in list_generations(storage, RUN)]))
    assert seen[0] == [1]
    assert storage.list("") == ()


def test_a_run_without_a_record_is_said_to_be_left_and_can_be_cleaned(stopped: dict[str, bytes]) -> None:
    storage = without(stopped, lambda key: key.endswith("/run.json") or ("/generations/" in key and "json" in key))
    count = len([key for key in storage.list("") if "/owner/" not in key])
    first = next(key for key in storage.list("") if "/owner/" not in key)
    with pytest.raises(RunUnknown) as unknown:
        stop(storage, RUN, gone)
    assert str(unknown.value) == (
        f"there is no run {RUN!r} in this storage; {count} objects of one, such as {first}, without a record: "
        f"its client ended before it began, {WHY_GONE}; funcpipe run clean {RUN} deletes what is left"
    )
    assert clean(storage, RUN, gone) == count
    assert storage.list("") == ()


def test_a_client_whose_lease_vanishes_says_so_and_the_run_can_be_resumed(
    storage: MemoryStorage, functions: HeldPlatform
) -> None:
    made = replace(smaller_job(stages=2, replicas=1), epochs=4)
    session = session_on(Site(functions, storage, "memory://"), reopen=functions.open)
    expected = launch(prepare(made, session, faults=STEADY, settings=RunSettings(name="plain")))
    functions.hold(5)
    faults = replace(STEADY, keep=True)
    prepared, deleted = prepare(made, session, faults=faults, settings=RunSettings(name=RUN)), threading.Event()

    def vanish(progress: object) -> None:
        if not deleted.is_set():
            storage.delete_many(storage.list(Keys(RUN).owner.owner_leases))
            deleted.set()
            functions.go_on()

    with pytest.raises(RunHalted) as ended:
        launch(prepared, vanish)
    assert str(ended.value) == (
        f"run {RUN} was ended here: the lease of owner 0 is missing: {WHY_GONE}; funcpipe run status {RUN} shows what "
        "is left of it, and train with --resume goes on from that"
    )
    functions.stop_all()
    assert_same(launch(prepare(made, session, faults=faults, settings=RunSettings(resume=RUN))), expected)
    assert storage.list("") == ()


TO_GO, TO_READ = "with steps to go", "before it reads the model"


@pytest.mark.parametrize(
    ("other", "asleep"),
    [("collects", TO_GO), ("cleans", TO_READ), *in_long_run([("collects", TO_READ), ("cleans", TO_GO)])],
)
def test_a_client_that_slept_while_another_ended_the_run_says_that_nothing_is_left(
    other: str, asleep: str, storage: MemoryStorage, functions: HeldPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first client stands still: its only other thread asks for nothing, and this one does what the other does."""
    monkeypatch.setattr(Owner, "_run", lambda self: None)
    made = replace(smaller_job(stages=2, replicas=1), epochs=4)
    session = session_on(Site(functions, storage, "memory://"), reopen=functions.open)
    expected = launch(prepare(made, session, faults=STEADY, settings=RunSettings(name="plain")))
    functions.hold(5)
    faults, collected = replace(STEADY, keep=True), list[RunResult]()

    def act() -> None:
        if other == "cleans":
            clean(storage, RUN, functions.open, take_over=True)
        else:
            settings = RunSettings(resume=RUN, take_over=True)
            collected.append(launch(prepare(made, session, faults=faults, settings=settings)))

    def sleep(progress: Progress) -> None:
        if progress.step == 5:
            functions.go_on()
            if asleep == "with steps to go":
                act()

    real = RunReader.model

    def load_late(reader: RunReader, step: int, *, opened: bool = False) -> StageState:
        monkeypatch.setattr(RunReader, "model", real)
        act()
        return reader.model(step, opened=opened)

    if asleep == "before it reads the model":
        monkeypatch.setattr(RunReader, "model", load_late)
    with pytest.raises(RunUnknown) as ended:
        launch(prepare(made, session, faults=faults, settings=RunSettings(name=RUN)), sleep)
    assert str(ended.value) == (
        f"run {RUN} was ended here: the lease of owner 0 is missing: {WHY_GONE}; nothing is left of it to resume: "
        "train without --resume begins it anew"
    )
    assert not hasattr(ended.value, "__notes__")
    assert storage.list("") == ()
    again = launch(prepare(made, session, faults=faults, settings=RunSettings(name=RUN)))
    for result in (*collected, again):
        assert_same(result, expected)


def test_a_run_without_a_record_is_gone_and_one_whose_record_is_damaged_is_not(stopped: dict[str, bytes]) -> None:
    refuse_if_gone(filled(stopped), RUN, "why")
    refuse_if_gone(filled({k: b"" if k.endswith("/run.json") else v for k, v in stopped.items()}), RUN, "why")
    storage = without(stopped, lambda key: key.endswith("/run.json") or ("/generations/" in key and "json" in key))
    left = f"why; what is left of it cannot be resumed: funcpipe run clean {RUN} deletes what is left, then train again"
    with pytest.raises(RunUnknown, match=f"^{left}$"):
        refuse_if_gone(storage, RUN, "why")
    clean(storage, RUN, gone)
    with pytest.raises(RunUnknown, match=r"^why; nothing is left of it to resume: "):
        refuse_if_gone(storage, RUN, "why")


@pytest.mark.parametrize(
    ("lost", "rest"),
    [
        ("", "nothing is left of it to resume: train without"),
        ("run.json", rf"what is left .* funcpipe run clean {RUN} "),
    ],
)
def test_a_run_that_vanishes_while_it_is_resumed_is_not_said_to_be_taken(
    lost: str, rest: str, job: Job, stopped: dict[str, bytes]
) -> None:
    storage = filled(stopped)
    session = session_on(Site(ThreadPlatform(load_spec("local"), storage), storage, "memory://"), reopen=gone)
    prepared = prepare(job, session, faults=FAULTS, settings=RunSettings(resume=RUN))
    storage.delete_many([key for key in storage.list("") if key.endswith(lost) or "/generations/" in key])
    why = rf"^run {RUN} has vanished since this client has looked: {re.escape(WHY_GONE)}; {rest}"
    with pytest.raises(RunUnknown, match=why):
        launch(prepared)


def test_a_client_that_deletes_a_run_another_has_deleted_says_so(storage: MemoryStorage) -> None:
    with (  # noqa: PT012 - the lease vanishes inside
        pytest.raises(
            RunUnknown,
            match=rf"^run {RUN}: the lease of owner 0 is missing: {re.escape(WHY_GONE)}; give the command again$",
        ),
        raise_if_taken(RUN),
        owned(storage, RUN) as owner,
    ):
        storage.delete_many(storage.list(f"{RUN}/owner/leases/"))
        owner.delete_run()


def test_functions_whose_leases_vanish_are_started_again_and_change_no_bit(
    storage: MemoryStorage, functions: HeldPlatform, caplog: pytest.LogCaptureFixture
) -> None:
    made = replace(smaller_job(stages=2, replicas=1), epochs=4)
    session = session_on(Site(functions, storage, "memory://"), reopen=functions.open)
    expected = launch(prepare(made, session, faults=STEADY, settings=RunSettings(name="plain")))
    functions.hold(5)
    prepared = prepare(made, session, faults=STEADY, settings=RunSettings(name=RUN))

    def vanish() -> None:
        (keys,) = list_generations(storage, RUN)
        storage.delete_many(storage.list(keys.leases("s1.r0")))
        functions.go_on()

    result = launch(prepared, lambda progress: vanish() if progress.step == 5 else None)
    assert_same(result, expected)
    assert result.losses == expected.losses
    assert f"ends without a report: the lease of attempt 0 of s1.r0 is missing: {WHY_GONE}" in caplog.text


@pytest.mark.parametrize(("attempt", "hours", "touched"), [(0, 0.5, 0), (0, 1.5, 1), (1, 0.1, 1), (1, 3.0, 2)])
def test_the_record_beside_checkpoints_is_as_young_as_they_are(
    attempt: int, hours: float, touched: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within an hour; a successor's first checkpoint makes it young, as nobody knows when it was before."""

    class Clock:
        now_s = 0.0

        def monotonic(self) -> float:
            return self.now_s

        thread_time = monotonic

    class Noting(MemoryStorage):
        def touch(self, key: str) -> None:
            touches.append(key)
            super().touch(key)

    clock, touches, storage = Clock(), list[str](), Noting()
    monkeypatch.setattr(checkpoint_manager, "time", clock)
    write_record(signed_for_tests(storage), races.KEYS, RECORD)
    manager = manager_on(storage, Recorded(), attempt=attempt)
    for done in range(1, 4 * EVERY):
        clock.now_s = hours * 3600 * done / (4 * EVERY)
        manager.after_step(done, lambda work: work())
    assert touches == [races.KEYS.saved_record] * touched
    storage.delete(races.KEYS.saved_record)
    clock.now_s = 1e6
    manager.after_step(4 * EVERY, lambda work: work())
    assert storage.get(races.KEYS.saved_record)


def test_a_function_that_has_lost_its_lease_writes_nothing(storage: MemoryStorage) -> None:
    lease = Lease(storage, races.KEYS, "s0.r0", 0, fresh_s=0.0)
    lease.take()
    fenced = FencedStorage(storage, lease)
    fenced.put("k", b"1")
    storage.delete(races.KEYS.lease("s0.r0", 0))
    for request in (partial(fenced.touch, "k"), partial(fenced.delete, "k"), partial(fenced.put, "k", b"2")):
        with pytest.raises(Superseded, match="is missing"):
            request()
    assert storage.get("k") == b"1"
