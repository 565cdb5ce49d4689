"""Values show themselves in a few lines, and in notebooks as a part of a page that needs nothing else."""

import re
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import example, given

from funcpipe.core import (
    CostItem,
    Estimate,
    Event,
    JobSpec,
    Optimality,
    Plan,
    Provision,
    ProvisionTable,
    Refusal,
    Rented,
    Resource,
    ScheduleKind,
    SolverReport,
    Source,
    Stage,
    Sync,
    Trace,
    Wire,
    read,
    write,
)
from funcpipe.show.describe import describe
from funcpipe.show.notebook import MOST_ROWS, curve, shortened
from funcpipe.show.page_parts import COLOURS
from tests.core.values import plans, profiles
from tests.examples import at_most

NASTY = "<script>alert('x')</script> & \"co\" #000000 color:red http://x"


def events(stages: int, steps: int) -> tuple[Event, ...]:
    return tuple(
        Event(
            task=f"forward.s{stage}.m{step}",
            stage=stage,
            replica=0,
            lane=lane,
            step=step,
            start_s=step + 0.1 * stage,
            end_s=step + 0.1 * stage + 0.5,
            waited_s=0.4 if lane is Resource.DOWNLOAD else 0.0,
        )
        for step in range(steps)
        for stage in range(stages)
        for lane in (Resource.COMPUTE, Resource.DOWNLOAD)
    )


TRACE = Trace(run="run-1", source=Source.EXECUTED, events=events(2, 3))
PROVISION = Provision(
    way="lambda-dnn",
    rented=(Rented(name="1769MB", count=4),),
    seconds=600.0,
    iterations=1000.0,
    cost=(CostItem(name="functions", usd=0.5), CostItem(name="requests", usd=0.25)),
    binds="the deadline",
    why="the cheapest that ends in time",
    miss_chance=0.01,
)
TABLE = ProvisionTable(
    job=JobSpec(samples=1000, global_batch=10, epochs=3),
    model="digits",
    platform="aws-lambda",
    market="aws-us-east-1",
    provisions=(PROVISION,),
    refusals=(Refusal(way="single-machine", reason="it is too slow"),),
    recommended="lambda-dnn",
    why="it is the cheapest",
)


def parsed(value: Any) -> ElementTree.Element:
    """The HTML of a value, which must be well-formed, load nothing, and have our hues alone or those around it."""
    page = ElementTree.fromstring(value._repr_html_())
    for element in page.iter():
        assert element.tag.rpartition("}")[2] not in ("script", "link", "style", "image", "img", "iframe")
        assert not {"href", "src"} & {name.rpartition("}")[2] for name in element.attrib}
        looks = " ".join(element.attrib.get(name, "") for name in ("style", "fill", "stroke"))
        assert "url(" not in looks
        assert set(re.findall(r"#[0-9a-f]{6}", looks)) <= set(COLOURS.values())
        assert not re.search(r"(?<![a-z-])(color|background):(?!inherit|none)", looks)
    return page


def tags(page: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [element for element in page.iter() if element.tag.rpartition("}")[2] == name]


@given(plans())
@example(
    Plan(
        global_batch=1,
        micro_batch=1,
        replicas=1,
        schedule=ScheduleKind.GPIPE,
        sync=Sync.PIPELINED,
        wire=Wire.FP32,
        stages=(Stage(first=0, stop=1, size="1769MB", memory_mb=1769),),
        estimate=Estimate(
            iteration_s=0.0,
            cost_usd=0.0,
            compute_usd=0.0,
            request_usd=0.0,
            peak_memory_bytes=0,
            puts=0,
            gets=0,
            bottleneck="compute",
            stages=(),
        ),
        solver=SolverReport(
            name="exact",
            status=Optimality.OPTIMAL,
            objective=0.0,
            gap=None,
            solve_s=0.0,
            bound=None,
            simulated_plans=1,
            simulated_s=0.0,
        ),
    )
)
@at_most(20)
def test_a_plan_is_a_few_lines_and_a_table_of_its_stages(plan: Any) -> None:
    assert repr(plan).startswith("Plan of ")
    assert len(repr(plan).splitlines()) <= 8
    page = parsed(replace(plan, model=NASTY, platform="local"))
    assert "".join(tags(page, "strong")[0].itertext()).startswith(f"Plan of {NASTY} on local: ")
    assert len(tags(page, "th")) == 7
    assert len(tags(page, "tr")) == len(repr(plan).splitlines()) + len(plan.stages)


@given(profiles())
@at_most(20)
def test_a_profile_is_a_few_lines_and_a_table_of_its_layers(profile: Any) -> None:
    named = replace(profile, model="digits")
    assert repr(named).startswith("Profile of digits on ")
    rows = tags(parsed(replace(named, platform=NASTY)), "tr")
    assert len(rows) == len(repr(named).splitlines()) + len(profile.layers)


def test_a_trace_shows_its_middle_step_lane_by_lane() -> None:
    assert repr(TRACE).splitlines() == [
        "Trace (executed): run-1, 12 events",
        "  steps: 3, numbers 1 to 3",
        "  duration: 2.6 s of 2 workers",
        "  lanes at work: compute 3 s, download 0.6 s",
    ]
    drawn = parsed(TRACE)
    assert [mark.text for mark in tags(drawn, "text")] == [
        "s0.r0 compute",
        "s0.r0 download",
        "s1.r0 compute",
        "s1.r0 download",
    ]
    assert [title.text for title in tags(drawn, "title")][:2] == [
        "forward.s0.m1: 0.5 s",
        "forward.s0.m1: 0.1 s, waited 0.4 s",
    ]
    many = tags(parsed(replace(TRACE, events=events(40, 1))), "text")
    assert many[-1].text == "and 56 more lanes"
    assert "run-1, 0 events" in repr(replace(TRACE, events=()))
    parsed(replace(TRACE, events=()))


def test_a_provision_says_what_is_rented_and_why() -> None:
    assert repr(PROVISION).splitlines() == [
        "Provision by lambda-dnn: 4 x 1769MB",
        "  takes: 10 min for 1000 iterations, missed with a chance of 1.0%",
        "  costs: $0.75",
        "  binds: the deadline",
        "  why: the cheapest that ends in time",
    ]
    assert [cell.text for cell in tags(parsed(PROVISION), "td")][-2:] == ["requests", "0.25"]


def test_ways_are_compared_in_a_table() -> None:
    assert "recommended: lambda-dnn: it is the cheapest" in repr(TABLE)
    assert "cannot: it is too slow" in repr(TABLE)
    row = [cell.text for cell in tags(parsed(TABLE), "td")][-6:]
    assert row == ["* lambda-dnn", "4 x 1769MB", "10 min", "0.75", "1.0%", "the deadline"]


@pytest.mark.parametrize("count", [1, MOST_ROWS, MOST_ROWS + 1, 400])
def test_a_long_table_loses_its_middle(count: int) -> None:
    rows = shortened([(str(i), "x") for i in range(count)])
    assert len(rows) <= MOST_ROWS
    assert (rows[0][0], rows[-1][0]) == ("0", str(count - 1))
    left_out = [int(row[0].split()[1]) for row in rows if row[0].startswith("…")]
    assert len(rows) - len(left_out) + sum(left_out) == count


def test_a_curve_has_gaps_where_losses_are_not_finite() -> None:
    drawn = ElementTree.fromstring(curve([1.0, 0.5, float("nan"), 0.25, 0.125]))
    assert [len(str(line.get("points")).split()) for line in tags(drawn, "polyline")] == [2, 2]
    assert curve([1.0]) == curve([float("inf")] * 3) == ""


def test_what_is_written_to_files_does_not_change(tmp_path: Any) -> None:
    write(PROVISION, tmp_path / "p.json")
    assert read(Provision, tmp_path / "p.json") == PROVISION


def test_a_value_that_nothing_describes_is_refused_with_those_that_are() -> None:
    with pytest.raises(TypeError, match=r"nothing describes a int, but: .*Plan, Trace"):
        describe(3)
