"""Tables in narrow terminals: columns give way, numbers stay whole."""

import io
import pkgutil
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from funcpipe import show as render
from funcpipe.analysis.compare import LaneReport, LaneUse, Report
from funcpipe.client.control.status import RunStatus, WorkerStatus
from funcpipe.client.control.verdict import Verdict
from funcpipe.core import (
    Busy,
    Estimate,
    LayerProfile,
    ModelProfile,
    Optimality,
    Outcome,
    Plan,
    Resource,
    ScheduleKind,
    SolverReport,
    Stage,
    StageEstimate,
    Sync,
    Wire,
)
from funcpipe.core.texts import number_text, time_text, usd_text
from funcpipe.partitioner.alternatives import Front, WhatIf
from funcpipe.platforms.catalog import load_spec
from funcpipe.runstate.liveness import WorkerState
from funcpipe.show.describe import Column, Description, Table
from funcpipe.show.runs import doing
from funcpipe.show.terminal import Terminal, draw
from funcpipe.training.verify import TensorDifference, Verification

Describe = Callable[[], Description]

LARGE_S, LARGE_USD, LARGE_BYTES = 98765.4321, 4321.987654, 123_456 << 20
STAGE = StageEstimate(
    base_bytes=LARGE_BYTES,
    state_bytes=0,
    activation_bytes=0,
    waste_bytes=0,
    forward_s=LARGE_S,
    forward_upload_s=0.0,
    forward_download_s=0.0,
    backward_s=2 * LARGE_S,
    backward_upload_s=0.0,
    backward_download_s=0.0,
    sync_s=3 * LARGE_S,
)
ESTIMATE = Estimate(
    iteration_s=LARGE_S,
    cost_usd=LARGE_USD,
    compute_usd=LARGE_USD,
    request_usd=LARGE_USD,
    peak_memory_bytes=LARGE_BYTES,
    puts=1,
    gets=1,
    bottleneck="upload of stage 11",
    stages=(STAGE,) * 12,
)
PLAN = Plan(
    global_batch=64,
    micro_batch=4,
    replicas=16,
    schedule=ScheduleKind.EAGER_ONE_F_ONE_B,
    sync=Sync.PIPELINED,
    wire=Wire.FP32,
    stages=tuple(
        Stage(first=100 * i, stop=100 * (i + 1), size="131072MB", memory_mb=131072, recompute=True) for i in range(12)
    ),
    model="my_models.transformers:gigantic",
    platform="aws-lambda",
    estimate=ESTIMATE,
    solver=SolverReport(name="exact", status=Optimality.OPTIMAL, objective=1.0, gap=0.0, solve_s=1234.56),
)
PATH = "/home/someone/experiments/of-this-week/gigantic-model/plans/plan-of-monday.json"
USE = LaneUse(busy_s=LARGE_S, wait_s=LARGE_S / 2, idle_s=LARGE_S / 3, usd=LARGE_USD, idle_usd=LARGE_USD / 2)


def profile() -> Description:
    layer = LayerProfile(
        name="encoder.layers.11.self_attention.output.dense",
        parameter_bytes=LARGE_BYTES,
        activation_bytes=LARGE_BYTES,
        forward_s=(LARGE_S,),
        backward_s=(LARGE_S,),
    )
    measured = ModelProfile(
        model="gigantic",
        micro_batch=4,
        platform="aws-lambda",
        sizes=("10240MB",),
        base_memory_bytes=1,
        layers=(layer,),
        tensors=(),
    )
    return render.profile(measured, "profile.json")


def what_if() -> Description:
    return render.what_if(WhatIf(now=PLAN, kept=ESTIMATE, obstacle=None, best=PLAN), "plan.json")


def front() -> Description:
    found = Front(
        model="gigantic",
        platform="aws-lambda",
        global_batch=64,
        status=Optimality.OPTIMAL,
        solve_s=1234.56,
        plans=(PLAN, PLAN),
        marked={"2^16": 0, "2^19": 0, "2^22": 0, "0": 1},
        recommended=1,
    )
    return render.front(found, "plan.json")


WORKER = WorkerStatus(
    worker="s11.r15",
    state=WorkerState.WORKING,
    attempt=123,
    outcome=None,
    step=1234567,
    saved_step=1234560,
    memory_bytes=LARGE_BYTES,
    memory_mb=131072,
    spent_usd=LARGE_USD,
    heard_s=123456,
    busy=(
        Busy(lane="compute", task="backward.s11.m15", since_s=1234.5),
        Busy(lane="download", task="get.s11.m15", since_s=1234.5, awaits="put.s10.m15"),
    ),
    error=None,
)


def status() -> Description:
    worker = WORKER
    failed = replace(worker, outcome=Outcome.FAILED, error="ValueError: the loss is nan", busy=())
    idle = replace(worker, busy=())
    lost = replace(idle, state=WorkerState.DEAD, heard_s=None, error="killed by SIGKILL")
    found = RunStatus(
        run="run-20261122-110605-0123abcd",
        generation=0,
        steps=9999999,
        run_usd=LARGE_USD,
        run_s=LARGE_S,
        halt="it was stopped",
        verdict=Verdict.WAITING,
        explanation="for worker s10.r15, whose function has ended (killed by SIGKILL), which is to be started again",
        saved_step=1234560,
        workers=(worker, failed, idle, lost),
    )
    return render.run_status(found, "file:///runs")


def verification() -> Description:
    tensors = (
        TensorDifference(
            name="encoder.layers.11.self_attention.output.dense.weight", layer="encoder", difference=1.23e-10
        ),
        TensorDifference(name="bias", layer="encoder.layers.11.self_attention.output", difference=4.56e-10),
    )
    return render.verification(Verification(steps=3, tolerance=1e-4, tensors=tensors))


def comparison() -> Description:
    lanes = tuple(LaneReport(stage=11, lane=lane, predicted=USE, observed=USE) for lane in Resource)
    unused = replace(USE, busy_s=0.0, usd=None, idle_usd=None)
    lanes += (LaneReport(stage=12, lane=Resource.MERGE, predicted=unused, observed=unused),)
    found = Report(run="run-1", steps=8, predicted_iteration_s=LARGE_S, observed_iteration_s=LARGE_S, lanes=lanes)
    return render.comparison(found, "observed.json")


def printed(describe: Describe, width: int) -> str:
    file = io.StringIO()
    draw(describe(), Console(file=file, width=width, highlight=False, markup=False, emoji=False))
    return file.getvalue()


def numbers(text: str) -> set[str]:
    """The words of `text` that are numbers, without punctuation around them."""
    words = {word.strip("(),;:$") for word in text.split()}
    return {word for word in words if word.replace(".", "", 1).replace("e-", "", 1).isdigit()}


@pytest.mark.parametrize("width", [40, 60, 80])
@pytest.mark.parametrize(
    "describe",
    [
        profile,
        lambda: render.plan(PLAN, "plan.json"),
        what_if,
        front,
        status,
        verification,
        comparison,
        lambda: render.platform(load_spec("aws-lambda")),
        lambda: render.platforms([load_spec("aws-lambda")]),
    ],
    ids=["profile", "plan", "what_if", "front", "status", "verification", "comparison", "platform", "platforms"],
)
def test_no_number_is_cut_in_a_narrow_terminal(describe: Describe, width: int) -> None:
    narrow, wide = printed(describe, width), printed(describe, 1000)
    assert "…" not in narrow
    assert "left out" not in wide
    assert numbers(narrow) <= numbers(wide)
    assert width < 60 or max(map(len, narrow.splitlines())) <= width


@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize("describe", [lambda: render.plan(PLAN, PATH), comparison, status])
def test_lines_are_whole_in_a_file_and_words_are_whole_in_a_terminal(describe: Describe, width: int) -> None:
    """As a script reads them, and as a person copies a path from them."""
    wide, read, seen = (io.StringIO() for _ in range(3))
    draw(describe(), Terminal(file=wide, width=1000))
    draw(describe(), Terminal(file=read, width=width))
    draw(describe(), Terminal(file=seen, width=width, force_terminal=True, color_system=None))
    begun = r"^(iteration: |exact: |waiting: |trace: ).*"
    sentences = {match[0] for match in re.finditer(begun, wide.getvalue(), re.MULTILINE)}
    assert sentences
    assert sentences <= set(read.getvalue().splitlines())
    words = {word for sentence in sentences for word in sentence.split()}
    assert words <= set(seen.getvalue().split())
    first = {sentence.split()[0] for sentence in sentences} - {"trace:"}  # which is a path
    shown = [line for line in seen.getvalue().splitlines() if line.split()[:1] and line.split()[0] in first]
    assert all(len(line.rstrip()) <= width for line in shown)


def tiny(value: Any) -> Any:
    """`value` with all its seconds, dollars and bytes so small that few digits would show nothing of them."""
    if isinstance(value, float):
        return value * 1e-13
    if isinstance(value, tuple):
        return tuple(map(tiny, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: tiny(getattr(value, field.name)) for field in fields(value)})
    return value


def test_no_amount_is_so_small_that_it_is_shown_as_nothing() -> None:
    plan = replace(PLAN, estimate=replace(tiny(ESTIMATE), hours_usd=1e-9))
    lane = LaneReport(stage=0, lane=Resource.UPLOAD, predicted=tiny(USE), observed=tiny(USE))
    found = Report(run="r", steps=1, predicted_iteration_s=1e-8, observed_iteration_s=2e-8, lanes=(lane,))
    for describe in (
        lambda: render.plan(plan, "plan.json"),
        lambda: render.what_if(WhatIf(now=plan, kept=plan.estimate, obstacle=None, best=plan), "plan.json"),
        lambda: render.comparison(found, "observed.json"),
    ):
        text = printed(describe, 1000)
        assert not re.findall(r"(?<![\d.])0\.0+(?![\d])", text), text


@given(value=st.floats(1e-12, 1e9), decimals=st.integers(0, 7))
def test_a_number_is_shown_to_two_digits_that_count_at_least(value: float, decimals: int) -> None:
    """And every amount that people are told is within a twentieth of what it is; cents, and seconds, may be whole."""
    assert float(number_text(value, decimals)) == pytest.approx(value, rel=0.051)
    assert float(number_text(-value, decimals)) == pytest.approx(-value, rel=0.051)
    assert float(usd_text(value)) == pytest.approx(value, rel=0.051)
    amount, unit = time_text(value).split()
    unit_s = {"s": 1, "min": 60, "h": 3600}[unit]
    assert float(amount) * unit_s == pytest.approx(value, rel=0.051, abs=unit_s / 2 if value >= 0.95 else 0.0)


def test_no_module_has_the_name_of_a_function_that_the_package_offers() -> None:
    """An import of the module would put it in the place of the function."""
    assert set(render.__all__) & {module.name for module in pkgutil.iter_modules(render.__path__)} == set()
    assert all(callable(getattr(render, name)) for name in render.__all__)


def test_nothing_is_shown_as_nothing() -> None:
    assert (number_text(0.0, 6), usd_text(0.0), time_text(0.0)) == ("0", "0.00", "0 s")


def test_columns_that_are_left_out_are_named() -> None:
    text = printed(comparison, 80)
    assert "left out for lack of width: idle s, predicted idle s, idle $" in " ".join(text.split())
    assert f"{LARGE_S:.4f}" in numbers(printed(comparison, 40))


def test_text_that_looks_like_markup_is_printed_as_it_is() -> None:
    made = Description(title="", tables=(Table.of("", ("layer", "n"), [("[red]a:smile:", "1")]),))
    assert "[red]a:smile:" in printed(lambda: made, 80)


@given(
    rows=st.lists(
        st.tuples(*[st.integers(0, 10**12).map(str)] * 4, st.text("ab 1", max_size=40)), min_size=1, max_size=4
    ),
    width=st.integers(20, 120),
)
def test_every_number_of_a_column_that_is_shown_is_whole(rows: list[tuple[str, ...]], width: int) -> None:
    columns = (Column("a"), Column("b", drop=2), Column("c", drop=1), Column("d"), Column("e", text=True))
    made = Description(title="", tables=(Table(columns=columns, rows=tuple(rows)),))
    shown = printed(lambda: made, width)
    words = set(shown.split())
    left_out = " ".join(shown.split()).partition("left out for lack of width:")[2].partition("(")[0]
    for i, column in enumerate(columns[:4]):
        if f" {column.name}" not in left_out:
            assert {row[i] for row in rows} <= words


def test_a_table_of_workers_shows_the_ends_of_a_long_error() -> None:
    text = doing(replace(WORKER, outcome=Outcome.FAILED, error="ValueError: <html>" + "x" * 8000 + "</html>"))
    assert re.fullmatch(r"failed: ValueError: <html>x+\n… 7,625 characters are left out here …\nx+</html>", text)
    assert len(text) < 500


def test_the_memory_of_gpus_is_shown_beside_what_the_plan_expected() -> None:
    (plain,) = status().tables
    assert "GPU MB" not in [column.name for column in plain.columns]
    first = replace(WORKER, device_bytes=612 << 20, planned_device_bytes=640 << 20)
    second = replace(WORKER, device_bytes=600 << 20)
    found = RunStatus(
        run="run-1",
        generation=0,
        steps=3,
        run_usd=1.0,
        run_s=2.0,
        halt=None,
        verdict=Verdict.WAITING,
        explanation="",
        saved_step=0,
        workers=(first, second, WORKER),
    )
    (table,) = render.run_status(found).tables
    column = [column.name for column in table.columns].index("GPU MB")
    assert [row[column] for row in table.rows] == ["612, planned 640", "600", "0"]
