"""The picture of functions with a GPU, and the lanes that it draws."""

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.studies.gpu_lanes import LANES, draw
from funcpipe.analysis.predict import predict
from funcpipe.core import LayerProfile, Plan, Resource, ScheduleKind, Stage, Sync, Wire
from funcpipe.platforms.catalog import load_spec
from tests.support.plans import chain_profile

SPEC = load_spec("modal")
SPEC = replace(SPEC, sizes=tuple(size for size in SPEC.sizes if size.name == "L4"))


ORDER = (
    *((0, Resource.COMPUTE), (0, Resource.TO_HOST), (0, Resource.UPLOAD)),
    *((1, Resource.DOWNLOAD), (1, Resource.TO_DEVICE), (1, Resource.COMPUTE)),
)


def test_messages_cross_bus_and_link_in_the_seconds_of_the_model(tmp_path: Path) -> None:
    """By hand: 24 MB take 1 ms of a bus of 24 GB/s, and 0.04 + 0.192 s of the link on either side of the store."""
    layer = LayerProfile(name="a", parameter_bytes=8, activation_bytes=8, forward_s=(1,), backward_s=(2,))
    profile = chain_profile([layer, replace(layer, name="b")], SPEC, sent_bytes=24_000_000)
    stages = (Stage(first=0, stop=1, size="L4", memory_mb=16384), Stage(first=1, stop=2, size="L4", memory_mb=16384))
    plan = Plan(
        global_batch=2,
        micro_batch=1,
        replicas=1,
        schedule=ScheduleKind.GPIPE,
        sync=Sync.PIPELINED,
        wire=Wire.FP32,
        stages=stages,
    )
    trace = predict(plan, profile, SPEC)
    assert {event.lane for event in trace.events} == LANES.keys()
    for event in trace.events:
        if event.lane in (Resource.TO_HOST, Resource.TO_DEVICE):
            assert event.busy_s == pytest.approx(0.001)
        elif event.lane is not Resource.COMPUTE:
            assert event.busy_s == pytest.approx(0.04 + 24 / 125)
    first = [next(e.start_s for e in trace.events if (e.stage, e.lane) == lane) for lane in ORDER]
    assert first == sorted(first), "as LANES has them"
    draw(trace, plan, tmp_path / "lanes.png")
    assert (tmp_path / "lanes.png").stat().st_size > 1000
