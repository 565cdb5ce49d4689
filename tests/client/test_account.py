"""What is shown of random runs, beside accounts of them that are kept another way; on functions that are threads.

Functions hand over after each step, die, and are restarted; batches are short; runs are validated and resumed. A stop
watch for each function, the list of what it has written and when, and the number of samples say what must be shown.
"""

import dataclasses
import functools
import io
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

from funcpipe import show as render
from funcpipe.client.control.status import status
from funcpipe.client.follow.results import RunResult
from funcpipe.client.prepare.job import Job
from funcpipe.core import (
    Estimate,
    FinishedRun,
    Invocation,
    RunRecord,
    RunSettings,
    Trace,
    Validation,
    WorkerSpec,
    write_trace,
)
from funcpipe.platforms.base import Handle
from funcpipe.platforms.catalog import load_spec
from funcpipe.show.describe import seconds, usd
from funcpipe.show.material import Material, load_kept
from funcpipe.show.page_parts import Drawing, Section
from funcpipe.show.page_run import bill_section, marks, progress_section, spent_section
from funcpipe.show.side_by_side import side_by_side
from funcpipe.testing.faults import FunctionFaults
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform, one_at_a_time
from funcpipe.worker import hand_over
from tests.client import validated
from tests.client.validated import BATCH, RUN, STEADY, held_out, run, samples
from tests.examples import at_most

ITERATION = Estimate(
    iteration_s=2.0,
    cost_usd=0.5,
    compute_usd=0.4,
    request_usd=0.1,
    peak_memory_bytes=1,
    puts=7,
    gets=11,
    bottleneck="stage 0 compute",
    stages=(),
)


class Stopwatch(FunctionFaults):
    """When a function was invoked, when it wrote which objects, and when it ended, all by the monotonic clock."""

    def __init__(self, killed_at: int | None) -> None:
        super().__init__(killed_at=killed_at)
        self.worker, self.attempt = "", 0
        self.began_s = self.ended_s = 0.0
        self.first_request_s = 0.0
        self.written: list[tuple[str, float]] = []

    def next(self, written: str = "") -> int:
        self.first_request_s = self.first_request_s or time.monotonic()
        number = super().next(written)
        self.written += [(written, time.monotonic())] if written else []
        return number

    def steps(self) -> list[int]:
        """The steps of whose messages it wrote any, the first first."""
        found = (re.search(r"/messages/s\d\.r\d/(\d{8})/", key) for key, _ in self.written)
        return sorted({int(one[1]) for one in found if one is not None})

    def first_s(self, part: str) -> float | None:
        """How old the function was when it first wrote an object whose key has that part."""
        return next((at_s - self.began_s for key, at_s in self.written if part in key), None)


class Timed(ThreadPlatform):
    """Functions that are threads, each with a stop watch; the one of number `victim` dies at request `killed_at`."""

    def __init__(self, storage: MemoryStorage, victim: int | None = None, killed_at: int = 0) -> None:
        self.watches: list[Stopwatch] = []

        def watch(number: int) -> Stopwatch:
            self.watches.append(Stopwatch(killed_at if number == victim else None))
            return self.watches[-1]

        super().__init__(load_spec("local"), storage, faults_of=watch)

    def invoke(self, worker: Invocation) -> Handle:
        began_s, handle = time.monotonic(), super().invoke(worker)
        assert isinstance(worker, WorkerSpec)
        watch = self._functions[handle.name].faults
        assert isinstance(watch, Stopwatch)
        watch.worker, watch.attempt, watch.began_s = worker.worker, worker.attempt, began_s
        return handle

    def _run(self, spec: Any, function: Any) -> None:
        try:
            super()._run(spec, function)
        finally:
            function.faults.ended_s = time.monotonic()


def model() -> nn.Module:
    """A network that trains on single samples, too, always with the same weights."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).double()


@functools.cache
def traced(replicas: int) -> Job:
    """A job whose model is traced once; a model cannot be traced while threads draw random numbers."""
    made = validated.job(Validation(data=held_out, every_steps=2), replicas=replicas, made=model)
    return dataclasses.replace(made, plan=dataclasses.replace(made.plan, estimate=ITERATION))


def job(*, replicas: int, count: int, epochs: int, validates: bool) -> Job:
    """Train on `count` samples."""
    made = traced(replicas)
    return dataclasses.replace(
        made,
        dataset=functools.partial(samples, count, 1),
        samples=count,
        epochs=epochs,
        evaluation=made.evaluation if validates else None,
    )


@pytest.fixture(autouse=True, scope="module")
def drawing_in_turn() -> Iterator[None]:
    traced(1), traced(2)
    with one_at_a_time():
        yield


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
    """A run that has ended, what is kept of it, and the stop watches of the functions since it was last started."""

    result: RunResult
    material: Material
    watches: list[Stopwatch]
    count: int
    began: int
    killed: bool
    """Whether a function was killed, maybe before it had recorded one that it had started, which was stopped then."""

    @property
    def finished(self) -> FinishedRun:
        assert self.material.finished is not None
        return self.material.finished

    @property
    def record(self) -> RunRecord:
        assert self.material.record is not None
        return self.material.record

    @property
    def trace(self) -> Trace:
        assert self.material.observed is not None
        return self.material.observed


@given(
    replicas=st.sampled_from([1, 2]),
    count=st.integers(BATCH, 3 * BATCH),
    epochs=st.integers(1, 2),
    validates=st.booleans(),
    hands_over=st.booleans(),
    killed_at=st.none() | st.integers(20, 120),
    resumes=st.booleans(),
)
@at_most(12)
def test_what_is_shown_of_a_run_adds_up(
    replicas: int,
    count: int,
    epochs: int,
    validates: bool,
    hands_over: bool,
    killed_at: int | None,
    resumes: bool,
) -> None:
    storage = MemoryStorage()
    made = job(replicas=replicas, count=count, epochs=epochs, validates=validates)
    functions = Timed(storage, None if killed_at is None else 0, killed_at or 0)
    faults = dataclasses.replace(STEADY, lifetime_s=3.0 if hands_over else None)
    with mock.patch.object(hand_over, "leaves_at_s", return_value=0.0):  # after each step: none is late
        result, began = run(made, storage, functions, faults=faults, lasts=True), 0
        if resumes:
            began, before = len(result.losses), functions
            made, functions = dataclasses.replace(made, epochs=epochs + 1), Timed(storage)
            again = RunSettings(resume=RUN)
            result = run(made, storage, functions, faults=faults, settings=again, before=before, lasts=True)
    ended = Ended(
        result=result,
        material=load_kept(storage, RUN, load_spec("local")),
        watches=functions.watches,
        count=count,
        began=began,
        killed=killed_at is not None and not resumes,
    )
    functions_report_what_stop_watches_say(ended)
    the_page_adds_up_to_the_bill(ended)
    steps_are_counted_with_their_samples(ended)
    restarts_are_all_told(ended, each_step=hands_over and killed_at is None and not validates)
    texts_tell_the_bill(ended, storage, functions)


def functions_report_what_stop_watches_say(ended: Ended) -> None:
    """A function starts until it has its lease, and before it writes its first message; its uses are its life."""
    watches = {(watch.worker, watch.attempt): watch for watch in ended.watches if watch.first_s("/reports/")}
    for report in ended.finished.workers:
        watch = watches[report.worker, report.attempt]
        lived_s, told_s = watch.ended_s - watch.began_s, watch.first_s("/reports/")
        assert told_s is not None
        assert report.alive_s <= told_s + 1e-3 <= lived_s + 2e-3
        assert sum(report.uses.values()) == pytest.approx(report.alive_s)
        lease_s, message_s = watch.first_s("/leases/"), watch.first_s("/messages/")
        assert lease_s is not None
        since_first_request_s = lease_s - (watch.first_request_s - watch.began_s)  # its own clock may begin until then
        assert since_first_request_s <= report.uses["start"] + 1e-3
        assert report.uses["start"] <= (lived_s if message_s is None else message_s) + 1e-3


def the_page_adds_up_to_the_bill(ended: Ended) -> None:
    """The account's last rows are the functions of the bill, whose parts are the whole."""
    bill, spent, billed = ended.finished.bill, spent_section(ended.material), bill_section(ended.material)
    assert spent is not None
    assert billed is not None
    (rows,) = [rows for rows in tables(spent) if "compute" in rows.get("stage", ())]
    *_, shown_s = rows["all"]
    *_, shown_usd = rows["all, price"]
    assert (shown_s, shown_usd) == (seconds(bill.function_seconds), usd(bill.compute_usd))
    lost_s = bill.function_seconds - sum(report.alive_s for report in ended.finished.workers)
    assert ("without a report" in rows) == (lost_s > 1e-6)
    by_stage = [sum(r.alive_s for r in ended.finished.workers if r.worker.startswith(f"s{i}.")) for i in range(2)]
    assert [rows[f"stage {i}"][-1] for i in range(2)] == [seconds(lived_s) for lived_s in by_stage]
    items, *_ = tables(billed)
    done = len(ended.finished.losses) - ended.began
    assert int(items["functions started"][1]) in (len(ended.watches), len(ended.watches) - ended.killed)
    assert items["puts"][:2] == [str(7 * done), f"{bill.puts:,}"]
    assert items["all"][:2] == [usd(0.5 * done), usd(bill.compute_usd + bill.request_usd)]
    assert bill.cost_usd == pytest.approx(bill.earlier_usd + bill.compute_usd + bill.request_usd)
    assert (bill.earlier_usd > 0) == (ended.began > 0)


def steps_are_counted_with_their_samples(ended: Ended) -> None:
    """In each traced step the page's samples a second, times its seconds, are the samples that are left of the data."""
    trace, section = ended.trace, progress_section(ended.material)
    assert section is not None
    curves = {part.caption: curve(part) for part in section.parts if isinstance(part, Drawing)}
    (rates,) = [points for caption, points in curves.items() if caption.startswith("Throughput in samples/s")] or [{}]
    a_step = list(range(0, ended.count, BATCH))
    ends = {step: max(event.end_s for event in trace.events if event.step == step) for step in trace.steps()}
    assert rates.keys() == {step + 1 for step in ends if step - 1 in ends}
    for step in (number - 1 for number in rates):
        rows = min(BATCH, ended.count - a_step[step % len(a_step)])
        assert rates[step + 1] * (ends[step] - ends[step - 1]) == pytest.approx(rows)
    losses = next(points for caption, points in curves.items() if caption.startswith("Mean loss"))
    assert list(losses) == list(range(1, len(ended.result.losses) + 1))
    spent = [points for caption, points in curves.items() if caption.startswith("Dollars of the")]
    if spent:
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "trace.json")
            write_trace(trace, path)
            told = {what: values[0] for what, values in side_by_side([path, path]).rows.items()}
        assert float(told["dollars"]) == pytest.approx(list(spent[0].values())[-1], rel=1e-3)
        stretches = sum(ends[s] for s in ends if s + 1 not in ends) - sum(
            min(event.start_s for event in trace.events if event.step == s) for s in ends if s - 1 not in ends
        )
        assert float(told["seconds"]) == pytest.approx(stretches, rel=1e-3)


def restarts_are_all_told(ended: Ended, *, each_step: bool) -> None:
    """Every later attempt of a worker is marked, at a step that it wrote first, or others before it.

    If a function leaves after `each_step`, that is the first step of which its attempt has written a message.
    """
    found = marks(ended.trace, ended.finished)
    for worker in {watch.worker for watch in ended.watches}:
        own = [mark for mark in found if mark.worker == worker]
        watches = [watch for watch in ended.watches if watch.worker == worker]
        last = max(watch.attempt for watch in watches if watch.first_s("/reports/"))
        assert len(own) == last
        steps = [mark.step for mark in own if mark.step is not None]
        assert steps == sorted(steps)
        for mark, attempt in zip(own, range(1, last + 1), strict=True) if len(steps) == last else ():
            assert mark.step is not None
            written = [step for watch in watches if watch.attempt == attempt for step in watch.steps()]
            before = [step for watch in watches if watch.attempt < attempt for step in watch.steps()]
            assert mark.step <= min(written, default=mark.step)
            assert mark.step <= max(before, default=ended.began - 1) + 1
            if each_step:
                assert written[:1] == [mark.step]
                assert mark.why == "handed over"


def texts_tell_the_bill(ended: Ended, storage: MemoryStorage, functions: Timed) -> None:
    """What a terminal, a notebook and `status` say of dollars, functions and steps."""
    bill, steps = ended.result.bill, len(ended.result.losses)
    found = status(storage, RUN, functions.open)
    assert found.run_usd == ended.finished.bill.cost_usd
    own = sum(worker.spent_usd for worker in found.workers)
    assert own == pytest.approx(sum(report.alive_s * report.usd_s for report in ended.finished.workers))
    assert found.step == steps
    console = Console(width=200, record=True, file=io.StringIO())
    render.draw(render.training_result(ended.result, written={}), console)
    notebook, terminal = repr(ended.result), console.export_text()
    for text in (notebook, terminal):
        assert re.search(rf"\b{steps} steps?\b", text), text
        assert ("before it was resumed" in text) == (ended.began > 0)
        assert f"{bill.functions} functions" in text


def curve(drawn: Drawing) -> Mapping[int, float]:
    """The points of a chart's line."""
    data = drawn.figure.renderers[0].data_source.data
    return dict(zip(data["x"], data["y"], strict=True))


def tables(section: Section) -> list[dict[str, list[str]]]:
    """The rows of a section's tables, by their first cell."""
    found = []
    for part in section.parts:
        if isinstance(part, str) and "<table" in part:
            rows = re.findall(r"<tr>(.*?)</tr>", part)
            cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]
            found.append({first: rest for first, *rest in cells})
    return found
