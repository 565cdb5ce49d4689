"""What a finished run keeps where its storage lasts, and what is done with it; on functions that are threads."""

import dataclasses
import math
import re

import pytest
import torch

from funcpipe import RunSettings, Verdict, export
from funcpipe.client.control.status import status
from funcpipe.client.control.stopping import clean, stop
from funcpipe.client.follow.launch import launch, launch_detached
from funcpipe.client.follow.results import Progress, RunResult
from funcpipe.client.prepare.prepared_run import PreparedRun, prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.errors import InvalidValue, PlanError, RunInterrupted, RunUnknown
from funcpipe.platforms.catalog import load_spec
from funcpipe.runstate.generations import newest_record
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.signing import KeyFolder, signed
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform
from tests.client.held import HeldPlatform
from tests.client.threads import RUN, STEADY, job

STEPS = 3
"""Of an epoch."""

pytestmark = pytest.mark.usefixtures("traced")


def prepared(
    storage: MemoryStorage, functions: ThreadPlatform, settings: RunSettings, *, epochs: int = 1, **changes: object
) -> PreparedRun:
    own = dataclasses.replace(job(), epochs=epochs, prices=functions.spec, **changes)  # type: ignore[arg-type]
    session = dataclasses.replace(session_on(Site(functions, storage, "memory://"), reopen=functions.open), lasts=True)
    return prepare(own, session, faults=STEADY, settings=settings)


def train(
    storage: MemoryStorage, functions: ThreadPlatform, *, epochs: int = 1, resume: bool = False, **changes: object
) -> RunResult:
    settings = RunSettings(resume=RUN) if resume else RunSettings(name=RUN)
    return launch(prepared(storage, functions, settings, epochs=epochs, **changes))


def assert_same(found: RunResult, expected: RunResult) -> None:
    assert found.losses == expected.losses
    assert found.state_dict().keys() == expected.state_dict().keys()
    assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in found.state_dict().items())


@pytest.fixture(scope="module")
def twice(traced: None) -> RunResult:
    """Two epochs at once."""
    storage = MemoryStorage()
    return train(storage, ThreadPlatform(load_spec("local"), storage), epochs=2)


def test_a_finished_run_keeps_its_model_its_record_and_its_trace_and_nothing_else(
    storage: MemoryStorage, functions: ThreadPlatform
) -> None:
    result = train(storage, functions)
    keys = Keys.of(newest_record(signed(storage), RUN))
    kept = [key.removeprefix(keys.prefix) for key in storage.list("")]
    patterns = [
        rf"{RUN}/generations/0000-{keys.nonce}(\.json)?",
        r"run\.json",
        r"finished\.json",
        r"checkpoints/run\.json",
        rf"checkpoints/s[012]/0000000{STEPS}\.s[012]\.r0\.a00000000\.(json|0\.safetensors)",
        r"traces/s[012]\.r[01]/00000000",
        rf"{RUN}/owner/leases/00000000\.[0-9a-f]+",
        rf"{RUN}/owner/heartbeats/00000000\.[0-9a-f]+",
    ]
    assert [key for key in kept if not any(re.fullmatch(pattern, key) for pattern in patterns)] == []
    assert [sum(bool(re.fullmatch(pattern, key)) for key in kept) for pattern in patterns] == [2, 1, 1, 1, 6, 6, 1, 1]
    assert KeyFolder().find(keys) is not None
    assert result.losses
    assert clean(storage, RUN, functions.open) == 17
    assert storage.list("") == ()
    assert KeyFolder().find(keys) is None


def test_what_is_kept_is_read_without_a_change(storage: MemoryStorage, functions: ThreadPlatform) -> None:
    result = train(storage, functions)
    before = {key: storage.get(key) for key in storage.list("")}
    for step in (None, STEPS):
        found = export(RUN, storage=storage, step=step)
        assert found.keys() == result.state_dict().keys()
        assert all(torch.equal(tensor, found[name]) for name, tensor in result.state_dict().items())
    told = status(storage, RUN, functions.open)
    assert (told.verdict, told.step, told.saved_step) == (Verdict.FINISHED, STEPS, STEPS)
    assert re.fullmatch(r"all 3 steps are done, and its model is kept \(\d+\.\d MB\)", told.explanation)
    assert told.run_usd == pytest.approx(result.bill.cost_usd, rel=0.5)
    assert [worker.worker for worker in told.workers] == [f"s{s}.r{r}" for s in range(3) for r in range(2)]
    assert stop(storage, RUN, functions.open) == told
    assert {key: storage.get(key) for key in storage.list("")} == before
    with pytest.raises(InvalidValue, match=f"step must be a step that run {RUN} has saved: 3"):
        export(RUN, storage=storage, step=1)
    with pytest.raises(RunUnknown, match="no run 'other'"):
        export("other", storage=storage)


def test_a_result_that_is_kept_is_collected_again_without_a_function(
    storage: MemoryStorage, functions: ThreadPlatform
) -> None:
    first = train(storage, functions)
    seen: list[Progress] = []
    again = prepared(storage, functions, RunSettings(resume=RUN))
    assert again.has_finished
    found = launch(again, seen.append)
    assert_same(found, first)
    assert found.workers == first.workers
    assert found.bill.functions == first.bill.functions
    assert found.trace.events == first.trace.events
    assert [progress.step for progress in seen] == [1, 2, 3]
    with pytest.raises(PlanError, match="has finished; there is nothing to resume"):
        launch_detached(prepared(storage, functions, RunSettings(resume=RUN)))
    with pytest.raises(InvalidValue, match="is the name of a run in this storage"):
        train(storage, functions)


def test_a_finished_run_goes_on_for_more_epochs_as_if_it_had_been_asked_for_them_at_once(
    storage: MemoryStorage, functions: ThreadPlatform, twice: RunResult
) -> None:
    first = train(storage, functions)
    longer = prepared(storage, functions, RunSettings(resume=RUN), epochs=2)
    assert longer.first_step == STEPS
    assert longer.account.spent_usd >= first.bill.cost_usd * 0.5 > 0
    found = launch(longer)
    assert_same(found, twice)
    assert found.bill.earlier_usd == longer.account.spent_usd
    assert len({Keys.of(newest_record(signed(storage), RUN)).prefix}) == 1
    assert status(storage, RUN, functions.open).steps == 2 * STEPS
    assert not [key for key in storage.list("") if "/g0000-" in key]
    with pytest.raises(
        PlanError, match="has done 6 steps already, and 1 epochs are 3; epochs count from the beginning"
    ):
        prepared(storage, functions, RunSettings(resume=RUN))


def test_a_client_that_dies_while_the_next_epochs_begin_loses_no_step(
    storage: MemoryStorage, functions: HeldPlatform, twice: RunResult
) -> None:
    train(storage, functions)

    def interrupt(progress: Progress) -> None:
        raise KeyboardInterrupt

    functions.hold(STEPS + 1)
    with pytest.raises(RunInterrupted):
        launch(prepared(storage, functions, RunSettings(resume=RUN), epochs=500), interrupt)
    record = newest_record(signed(storage), RUN)
    assert (record.generation, record.first_step, record.losses) == (1, STEPS, twice.losses[:STEPS])
    halted = prepared(storage, functions, RunSettings(resume=RUN), epochs=500)
    assert halted.first_step >= STEPS


def test_a_run_that_is_not_to_keep_its_model_leaves_nothing(storage: MemoryStorage, functions: ThreadPlatform) -> None:
    launch(prepared(storage, functions, RunSettings(name=RUN, keep_model=False)))
    assert storage.list("") == ()


def test_what_a_finished_run_began_with_is_not_kept(storage: MemoryStorage, functions: ThreadPlatform) -> None:
    train(storage, functions)
    with pytest.raises(RunUnknown, match="what it began with is not kept"):
        prepared(storage, functions, RunSettings(resume=RUN, from_start=True))


def test_a_kept_model_that_is_damaged_is_no_result(storage: MemoryStorage, functions: ThreadPlatform) -> None:
    train(storage, functions)
    keys = Keys.of(newest_record(signed(storage), RUN))
    (damaged,) = [key for key in storage.list(f"{keys.checkpoints}s1/") if key.endswith("safetensors")]
    storage.put(damaged, b"damage" + storage.get(damaged))
    with pytest.raises(RunUnknown, match=r"no checkpoint can be read.*s1"):
        export(RUN, storage=storage)
    with pytest.raises(
        RunUnknown, match=rf"run {RUN} has finished, but its model cannot be read.*funcpipe run clean {RUN}"
    ):
        prepared(storage, functions, RunSettings(resume=RUN))


def test_a_watcher_whose_turn_comes_when_all_is_collected_is_given_the_result(
    storage: MemoryStorage, functions: HeldPlatform
) -> None:
    functions.hold(1)
    launch_detached(prepared(storage, functions, RunSettings(name=RUN), epochs=2))
    first, second = (prepared(storage, functions, RunSettings(resume=RUN), epochs=2) for _ in range(2))
    assert first.running is not None
    functions.go_on()
    collected = launch(first)
    found = launch(second)
    assert_same(found, collected)
    assert not any(math.isnan(loss) for loss in found.losses)
