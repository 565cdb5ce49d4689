"""The key of a run from its start to its end: who has it, where it shows up, and when it goes."""

import dataclasses
import logging
from pathlib import Path

import pytest
import torch

from funcpipe.client.control.status import status
from funcpipe.client.control.stopping import clean, stop
from funcpipe.client.follow.launch import launch, launch_detached
from funcpipe.client.follow.results import Progress
from funcpipe.client.prepare.prepared_run import PreparedRun, prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import RunSettings
from funcpipe.core.run_key import RunKey
from funcpipe.errors import RunInterrupted, RunKeyMissing, StorageError
from funcpipe.platforms.base import OPEN, Gate
from funcpipe.platforms.catalog import load_spec
from funcpipe.runstate.functions import list_functions
from funcpipe.runstate.generations import list_generations, newest_record, reserve_generation
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.signing import FOLDER, RUN_KEY, KeyFolder, key_of, signed
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform
from tests.client.held import HeldPlatform
from tests.client.threads import RUN, STEADY, job

pytestmark = pytest.mark.usefixtures("traced")


class Noting(MemoryStorage):
    """A storage that notes all that was ever put."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, bytes]] = []

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        self.seen.append((key, bytes(data)))
        super().put(key, data, if_absent=if_absent, gate=gate)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this machine keeps its keys; nothing is told in the environment."""
    monkeypatch.delenv(RUN_KEY)
    monkeypatch.setenv(FOLDER, str(tmp_path / "keys"))
    return tmp_path / "keys"


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[RunKey]:
    """The keys that are drawn."""
    found: list[RunKey] = []
    original = RunKey.new

    def new() -> RunKey:
        found.append(original())
        return found[-1]

    monkeypatch.setattr(RunKey, "new", new)
    return found


def prepared(storage: MemoryStorage, functions: ThreadPlatform, settings: RunSettings) -> PreparedRun:
    session = session_on(Site(functions, storage, "memory://"), reopen=functions.open)
    return prepare(dataclasses.replace(job(), epochs=1), session, faults=STEADY, settings=settings)


def interrupted(storage: MemoryStorage, functions: HeldPlatform, *, keep: bool) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.step == 3:
            raise KeyboardInterrupt

    session = session_on(Site(functions, storage, "memory://"), reopen=functions.open)
    run = prepare(
        dataclasses.replace(job(), epochs=10_000),
        session,
        faults=dataclasses.replace(STEADY, keep=keep),
        settings=RunSettings(name=RUN),
    )
    functions.hold(3)
    with pytest.raises(RunInterrupted):
        launch(run, interrupt)
    functions.go_on()


def shown(key: RunKey) -> tuple[bytes, ...]:
    """How a key could show up."""
    return key.text.encode(), key.text.upper().encode(), bytes.fromhex(key.text)


def test_a_run_s_key_is_in_no_object_log_line_handle_or_representation(
    folder: Path, drawn: list[RunKey], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    storage = Noting()
    functions = ThreadPlatform(load_spec("local"), storage)
    ready = prepared(storage, functions, RunSettings(name=RUN))
    launch_detached(ready)
    (key,) = drawn
    record = newest_record(signed(storage), RUN)
    handles = list_functions(signed(storage), Keys.of(record))
    told = status(storage, RUN, functions.open)
    watching = prepared(storage, functions, RunSettings(resume=RUN))
    result = launch(watching)
    functions.stop_all()
    objects = b"\n".join(name.encode() + b"\n" + data for name, data in storage.seen)
    assert Keys.of(record).nonce.encode() in objects
    assert len(handles) == 6
    texts = [caplog.text, *(f"{value!r} {value}" for value in (ready, watching, record, handles, told, result))]
    for look in shown(key):
        assert look not in objects
        assert not any(look.decode("latin-1") in text for text in texts)
    assert storage.list("") == ()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("keep", [True, False])
def test_a_key_is_kept_as_long_as_its_run(
    storage: MemoryStorage, functions: HeldPlatform, folder: Path, keep: bool
) -> None:
    interrupted(storage, functions, keep=keep)
    left = list_generations(storage, RUN)
    assert len(left) == keep
    assert [file.name for file in folder.iterdir()] == [f"{RUN}.0000-{keys.nonce}" for keys in left]
    for keys in left:
        assert clean(storage, RUN, functions.open) > 0
        assert KeyFolder().find(keys) is None
    assert list(folder.iterdir()) == []


def test_each_generation_has_a_key_of_its_own_and_the_last_one_goes_with_the_result(
    storage: MemoryStorage, functions: HeldPlatform, folder: Path, drawn: list[RunKey]
) -> None:
    interrupted(storage, functions, keep=True)
    (first,) = folder.iterdir()
    seen: list[list[Path]] = []
    result = launch(
        prepared(storage, functions, RunSettings(resume=RUN, from_start=True)),
        lambda progress: seen.append(list(folder.iterdir())),
    )
    assert len(drawn) == 2
    assert all(len(files) == 1 and files != [first] for files in seen)
    assert len(seen) == len(result.losses) > 0
    assert list(folder.iterdir()) == []


def test_another_machine_can_do_with_a_run_what_it_is_told_the_key_of(
    storage: MemoryStorage, functions: HeldPlatform, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(storage, functions, keep=True)
    key = key_of(KeyFolder(), list_generations(storage, RUN)[0]).text
    before = {name: storage.get(name) for name in storage.list("")}
    monkeypatch.setenv(FOLDER, str(tmp_path / "another machine"))
    said = (
        rf"the key of run {RUN} is not on this machine.*"
        rf"`funcpipe run status {RUN} --key` prints it: set FUNCPIPE_RUN_KEY to that here; "
    )
    with pytest.raises(RunKeyMissing, match=said):
        status(storage, RUN, functions.open)
    with pytest.raises(RunKeyMissing, match=said):
        stop(storage, RUN, functions.open)
    with pytest.raises(RunKeyMissing, match=said):
        prepared(storage, functions, RunSettings(resume=RUN, from_start=True))
    with pytest.raises(RunKeyMissing, match=said):
        prepared(storage, functions, RunSettings(name=RUN))
    assert {name: storage.get(name) for name in storage.list("")} == before
    monkeypatch.setenv(RUN_KEY, key)
    assert status(storage, RUN, functions.open).saved_step > 0
    result = launch(prepared(storage, functions, RunSettings(resume=RUN, from_start=True)))
    assert storage.list("") == ()
    again = launch(prepared(storage, functions, RunSettings(name=RUN)))
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in result.state_dict().items())
    assert list((tmp_path / "another machine").iterdir()) == []


def test_a_run_whose_key_is_gone_can_be_deleted_and_so_can_what_others_have_put_there(
    storage: MemoryStorage,
    functions: HeldPlatform,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    interrupted(storage, functions, keep=True)
    planted = Keys(RUN, 1, "0123456789abcdef")
    for name in (planted.reservation, planted.payload("s0.r0"), planted.record):
        storage.put(name, b"theirs")
    with pytest.raises(RunKeyMissing, match=f"`funcpipe run clean {RUN}` deletes the run without it"):
        status(storage, RUN, functions.open)
    assert clean(storage, RUN, functions.open) > 3
    assert storage.list("") == ()
    assert "functions of generation 1 are left to end" in caplog.text
    interrupted(storage, functions, keep=True)
    monkeypatch.setenv(FOLDER, str(tmp_path / "another machine"))
    assert clean(storage, RUN, functions.open) > 0
    assert storage.list("") == ()


def test_without_a_key_clean_deletes_what_a_half_deleted_run_has_left(
    storage: MemoryStorage, functions: HeldPlatform, folder: Path
) -> None:
    """Neither its record nor a payload says where its functions ran."""
    left = Keys(RUN, 0, "0123456789abcdef")
    storage.put(left.function("s0.r0", 0, "2839f05d"), b"theirs")
    assert clean(storage, RUN, functions.open) == 1
    assert storage.list("") == ()


def test_no_key_is_left_of_a_run_that_could_not_begin(
    functions: ThreadPlatform, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(MemoryStorage):
        def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
            raise StorageError("no space")

    with pytest.raises(StorageError, match="no space"):
        reserve_generation(Full(), RUN)
    assert list(folder.iterdir()) == []
