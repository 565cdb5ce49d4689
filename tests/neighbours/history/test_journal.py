"""The file of the history: where it lies, what a damaged line costs, and that it does not grow for ever."""

import fcntl
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from funcpipe.core import Comparison, JobSpec, Observation, WayRun, to_text
from funcpipe.core.history import ComparedWay
from funcpipe.errors import InvalidValue
from funcpipe.neighbours.history.journal import MOST_COMPARISONS, Entry, append, history_file, read_all, read_history
from tests.neighbours.history.observations import observation


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "history.jsonl"


def of_runs(count: int) -> list[Observation]:
    return [observation(run=f"r{number}") for number in range(count)]


def test_it_lies_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUNCPIPE_HISTORY", "/somewhere/h.jsonl")
    assert history_file() == Path("/somewhere/h.jsonl")
    monkeypatch.setenv("FUNCPIPE_HISTORY", "")
    assert history_file() is None
    assert read_history() == ()
    monkeypatch.delenv("FUNCPIPE_HISTORY")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert history_file() == Path("/data/funcpipe/history.jsonl")
    monkeypatch.delenv("XDG_DATA_HOME")
    assert history_file() == Path.home() / ".local/share/funcpipe/history.jsonl"


def test_what_is_filed_is_read_back_once(path: Path) -> None:
    assert read_history(path) == ()
    append(path, of_runs(2))
    append(path, of_runs(3))
    assert read_history(path) == tuple(of_runs(3))


def test_a_damaged_line_is_reported_and_skipped(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    append(path, of_runs(1))
    with path.open("ab") as file:
        file.write(b'{"format": "funcpipe.observation/1", "run": \n\xff\xfe\n{"format": "funcpipe.obs')
    append(path, of_runs(2))
    caplog.clear()
    assert read_history(path) == tuple(of_runs(2))
    assert [f"{path}:{line}: not JSON" in caplog.text for line in (2, 3, 4, 5)] == [True, True, True, False]


def test_a_history_that_cannot_be_read_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_history(tmp_path) == ()
    assert "cannot be read" in caplog.text


def test_a_full_history_keeps_its_newest_half(path: Path) -> None:
    most = 10 * len(to_text(observation()))
    for one in of_runs(40):
        append(path, [one], most_bytes=most)
    kept = read_history(path)
    assert path.stat().st_size <= most
    assert kept == tuple(of_runs(40)[-len(kept) :])
    assert len(kept) >= 4
    assert {file.name for file in path.parent.iterdir()} == {path.name, f"{path.name}.lock"}


def test_writers_take_turns(path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda one: append(path, [one]), of_runs(40)))
    assert {one.run for one in read_history(path)} == {one.run for one in of_runs(40)}


def test_a_writer_that_keeps_the_lock_holds_nobody_up(path: Path) -> None:
    append(path, of_runs(1))
    with path.with_name(f"{path.name}.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match="another process has locked"):
            append(path, of_runs(2), lock_s=0.0)
    assert read_history(path) == tuple(of_runs(1))


@pytest.mark.parametrize("field", ["run", "platform", "ran_on", "size"])
def test_an_observation_says_what_it_is_of(field: str) -> None:
    with pytest.raises(InvalidValue, match=field):
        observation(**{field: ""})


def test_an_observation_has_no_negative_seconds() -> None:
    with pytest.raises(InvalidValue, match="observed_s"):
        observation(observed_s=-1.0)


def comparison(key: str) -> Comparison:
    way = ComparedWay(way="w", key="k", rented="m", place="aws", seconds=1.0, usd=1.0, iterations=1.0)
    job = JobSpec(samples=1, global_batch=1, epochs=1)
    names = {"model": "m", "platform": "local", "market": "aws", "recommended": "w"}
    return Comparison(key=key, job=job, ways=(way,), at_s=1.0, **names)


def way_run(key: str, run: str = "r") -> WayRun:
    return WayRun(comparison=key, way="w", run=run, ran_on="aws", share=1.0, seconds=1.0, usd=0.5, at_s=2.0)


def test_lines_of_all_kinds_are_read_back_each_once(path: Path) -> None:
    lines: list[Entry] = [*of_runs(1), comparison("a"), way_run("a")]
    append(path, lines)
    append(path, [*lines, replace(comparison("a"), at_s=9.0), replace(way_run("a"), usd=0.6), way_run("a", "s")])
    found = read_all(path)
    assert (found.observations, found.comparisons) == (tuple(of_runs(1)), (comparison("a"),))
    assert found.way_runs == (way_run("a"), way_run("a", "s"))
    assert read_history(path) == tuple(of_runs(1))


def test_too_many_comparisons_lose_their_oldest_and_last_those_with_runs(path: Path) -> None:
    append(path, [*of_runs(3), comparison("0"), way_run("0")])
    for number in range(1, MOST_COMPARISONS + 1):
        append(path, [comparison(str(number))])
    found, kept = read_all(path), MOST_COMPARISONS // 2
    newest = range(MOST_COMPARISONS - kept + 2, MOST_COMPARISONS + 1)
    assert [one.key for one in found.comparisons] == ["0", *map(str, newest)]
    assert (found.observations, found.way_runs) == (tuple(of_runs(3)), (way_run("0"),))
    append(path, [comparison("new")])
    assert len(read_all(path).comparisons) == kept + 1
