"""The picture of functions with a GPU: its lanes together are the events of the trace."""

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.studies.gpu_lanes import LANES, draw, parts
from funcpipe.analysis.predict import predict
from funcpipe.core import LayerProfile, Plan, Resource, ScheduleKind, Stage, Sync, Wire
from funcpipe.platforms.catalog import load_spec
from tests.support.plans import chain_profile

SPEC = load_spec("modal")
SPEC = replace(SPEC, sizes=tuple(size for size in SPEC.sizes if size.name == "L4"))


def test_a_message_crosses_bus_and_link_in_the_seconds_of_the_model(tmp_path: Path) -> None:
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
    for event in trace.events:
        found = [*parts(event, plan, SPEC)]
        seconds = {lane: end_s - start_s for lane, _, start_s, end_s in found}
        if event.lane is Resource.COMPUTE:
            assert sum(seconds.values()) == pytest.approx(event.busy_s)
            continue
        link, bus = (LANES[4], LANES[3]) if event.lane is Resource.UPLOAD else (LANES[0], LANES[1])
        assert seconds == pytest.approx({link: 0.04 + 24 / 125, bus: 0.001})
        order = [lane for lane, *_ in sorted(found, key=lambda part: part[2])]
        assert order == [lane for lane in LANES if lane in seconds], "as LANES has them"
    draw(trace, plan, SPEC, tmp_path / "lanes.png")
    assert (tmp_path / "lanes.png").stat().st_size > 1000
