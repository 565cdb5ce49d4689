"""A function that is told to stop, and one whose work fails."""

import logging
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from funcpipe.core.backoff import Backoff
from funcpipe.errors import FormatError, StorageBusy, StorageError
from funcpipe.platforms import entry, entry_aws
from funcpipe.platforms.base import OPEN, Gate, Invoked
from funcpipe.platforms.entry import STOPPED, StopWatch, run, stop_key
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.worker import invocation
from tests.support.waiting import LONG_S


def test_a_watch_ends_the_process_once_it_is_told_to() -> None:
    storage, codes, ended = MemoryStorage(), list[int](), threading.Event()

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    with StopWatch(storage, "request", poll_s=0.01, end=end):
        assert not ended.wait(0.1)
        storage.put(stop_key("another"), b"")
        assert not ended.wait(0.1)
        storage.put(stop_key("request"), b"")
        assert ended.wait(LONG_S)
    assert codes == [STOPPED]


def test_a_watch_ends_with_its_invocation() -> None:
    storage, codes = MemoryStorage(), list[int]()
    with StopWatch(storage, "request", poll_s=0.01, end=codes.append):
        pass
    storage.put(stop_key("request"), b"")
    assert codes == []
    assert not [thread for thread in threading.enumerate() if thread.name == "funcpipe-stop"]


class Refusing(MemoryStorage):
    """A storage that fails with `errors`, one after the other, and then tells the function to stop."""

    def __init__(self, errors: list[StorageError]) -> None:
        super().__init__()
        self.errors = errors
        self.put(stop_key("request"), b"")

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        if self.errors:
            raise self.errors.pop(0)
        return super().get(key, start=start, stop=stop, gate=gate)


def test_a_watch_outlives_any_error_of_the_storage_and_asks_less_and_less_meanwhile(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    refused = StorageError("s3://bucket/stops/request: AccessDenied (403)")
    storage, codes, pauses, ended = Refusing([refused, StorageBusy("503"), refused]), list[int](), list[float](), []

    def end(code: int) -> None:
        codes.append(code)
        ended.append(threading.current_thread().name)

    def pause(seconds: float) -> bool:
        pauses.append(seconds)
        return False

    growing = Backoff(first_s=5.0, most_s=30.0, draw=lambda: 1.0)
    watch = StopWatch(storage, "request", poll_s=5.0, retries=growing, pause=pause, end=end)
    with watch:
        watch.join()
    assert (codes, ended) == ([STOPPED], ["funcpipe-stop"])
    assert pauses == [10.0, 15.0, 25.0]
    assert "cannot ask whether this function is to stop, asks again in 10 s" in caplog.text


def test_a_payload_that_is_none_is_told() -> None:
    with pytest.raises(FormatError, match="the invocation payload"):
        run("{}", Invoked())


class LambdaContext:
    """What the runtime client tells: Lambda ends the invocation in 123.456 s."""

    aws_request_id = "request"

    def get_remaining_time_in_millis(self) -> int:
        return 123_456


def test_a_function_on_lambda_knows_when_it_was_invoked_and_when_it_will_be_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(entry_aws.CONTROL, tmp_path.as_uri())
    seen: list[tuple[str, Invoked]] = []
    monkeypatch.setattr(entry, "run", lambda payload, invoked: seen.append((payload, invoked)))
    before_s = time.monotonic()
    assert entry_aws.handler({"format": "x"}, LambdaContext()) == {"invocation": "request"}
    ((payload, invoked),) = seen
    assert payload == '{"format": "x"}'
    assert invoked.lifetime_s == 123.456
    assert before_s <= invoked.at_s <= time.monotonic()
    assert invoked.meter.counts.gets == invoked.meter.counts.empty_gets == 1  # its own watch counts


def test_the_first_invocation_of_an_environment_on_lambda_is_billed_for_its_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(entry_aws.CONTROL, tmp_path.as_uri())
    monkeypatch.setattr(entry_aws, "_ENVIRONMENT", entry.Environment(2.5))
    seen: list[Invoked] = []
    monkeypatch.setattr(entry, "run", lambda payload, invoked: seen.append(invoked))
    for _ in range(2):
        entry_aws.handler({"format": "x"}, LambdaContext())
    assert [invoked.init_s for invoked in seen] == [2.5, 0.0]
    now_s = time.monotonic()
    assert seen[0].billed_s >= 2.5 + now_s - seen[0].at_s - 1e-6  # of rounding


def test_an_environment_is_loaded_before_its_first_function_or_as_far_as_there_is_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_load, begun = threading.Event(), threading.Event()

    def load(name: str) -> None:
        begun.set()
        assert may_load.wait(LONG_S)

    monkeypatch.setattr("importlib.import_module", load)
    late = entry.Environment(0.5)
    late.load_within(0.01)
    assert begun.wait(LONG_S)
    first = late.invoked()  # which will wait for the import itself
    assert first.init_s >= 0.51
    assert {*first.start.times.parts} == {"interpreter", "torch"}
    may_load.set()
    loaded = entry.Environment()
    loaded.load_within(LONG_S)
    first, second = loaded.invoked(lifetime_s=5.0), loaded.invoked(at_s=7.0)
    assert {*first.start.times.parts} == {"torch", "modules"}
    assert [one.start.readiness.value for one in (first, second)] == ["cold", "reused"]
    assert (first.lifetime_s, second.at_s, second.init_s, second.start.times.parts) == (5.0, 7.0, 0.0, {})


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux")
def test_a_process_knows_its_age() -> None:
    code = "import time; time.sleep(0.3); from funcpipe.platforms.entry import process_age_s; print(process_age_s())"
    began_s = time.monotonic()
    age_s = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert 0.3 <= age_s <= time.monotonic() - began_s + 0.02


def test_a_function_is_as_old_as_its_invocation_and_not_as_its_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Invoked] = []
    monkeypatch.setattr(invocation, "main", lambda payload, invoked, **_: seen.append(invoked))
    before_s = time.monotonic()
    entry.main("{}")
    early = Invoked(at_s=before_s - 100.0)
    run("{}", early)
    assert before_s <= seen[0].at_s <= time.monotonic()
    assert seen[1] is early
