from pathlib import Path

import pytest

from funcpipe.core import ScheduleKind, Sync, Trace
from funcpipe.scheduler.graph import StepShape, build_graph
from funcpipe.scheduler.simulator.costs import Cost
from funcpipe.scheduler.simulator.simulate import simulate
from funcpipe.scheduler.tasks import Kind
from funcpipe.show.page_parts import COLOURS
from funcpipe.show.timeline import LETTERS, NAMES, draw, draw_one, gantt_lines, letter
from tests.scheduler.shapes import chain_routes


def step(schedule: ScheduleKind) -> Trace:
    """Two stages, four micro-batches; every forward and backward takes a second."""
    shape = StepShape(
        stages=2, replicas=1, micro_batches=4, routes=chain_routes(2), schedule=schedule, sync=Sync.PIPELINED
    )
    return simulate(build_graph(shape), lambda task: Cost(float(task.kind in (Kind.FORWARD, Kind.BACKWARD))))


def test_lanes_are_drawn_to_scale() -> None:
    lines = gantt_lines(step(ScheduleKind.ONE_F_ONE_B), columns=20)
    compute = {line[:5]: line.split()[2] for line in lines if " compute " in line}
    assert compute == {"s0.r0": "ffff..bbffbbffbb..bb", "s1.r0": "..ffbbffbbffbbffbbu."}
    assert lines[-1].startswith("f forward")


def test_every_kind_of_task_has_a_letter_that_is_explained() -> None:
    assert [kind for kind in Kind if f"{letter(f'{kind.value}.s0.r0')} " not in LETTERS] == []


def test_a_copy_goes_the_way_of_its_message() -> None:
    """By its letter it would otherwise be an `a` or a `g`."""
    assert letter("activation-to-host.s0.r0.m0.k0") == letter("put-activation.s0.r0.m0.k0") == ">"
    assert letter("gradient-to-device.s0.r0.m0.p1") == letter("get-gradient.s0.r0.m0.p1") == "<"


def test_every_kind_of_task_has_a_name_and_a_colour() -> None:
    """Also the joint loss, without whose colour there was no page on a plan with one."""
    kinds = {letter(f"{kind.value}.s0.r0") for kind in Kind}
    assert kinds <= NAMES.keys()
    assert NAMES.keys() == COLOURS.keys()


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_two_traces_are_drawn_into_one_picture(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"both.{ending}"
    draw(step(ScheduleKind.GPIPE), step(ScheduleKind.ONE_F_ONE_B), path)
    assert path.stat().st_size > 10_000


def test_one_trace_is_drawn_by_itself(tmp_path: Path) -> None:
    draw_one(step(ScheduleKind.GPIPE), tmp_path / "one.svg")
    draw(step(ScheduleKind.GPIPE), step(ScheduleKind.GPIPE), tmp_path / "both.svg")
    bars = [(tmp_path / name).read_text().count("<path") for name in ("one.svg", "both.svg")]
    assert 0 < bars[0] < bars[1]
