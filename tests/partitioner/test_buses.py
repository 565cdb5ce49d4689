"""Copies between a GPU and its host: lanes of their own in the closed form, the simulators and what is predicted."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.analysis.predict import predict
from funcpipe.core import Resource, ScheduleKind, Stage, Sync, Wire
from funcpipe.partitioner.cost.evaluate import evaluate
from tests.partitioner.instances import chain
from tests.partitioner.test_devices import gpu_platform, gpu_size, two_layers, two_stages

SLOW = gpu_platform(gpu_size("gpu", memory_mb=16384, device_mb=16384, bus_gb_s=0.03), cpus=0)
"""Whose GPU has a bus half as fast as its link."""


def test_a_message_crosses_the_bus_and_then_the_link() -> None:
    """By hand: 6 MB take 0.0005 s at 12 GB/s, then 0.1 s at 60 MB/s and a latency, half of that in 16 bits; a gradient
    and its sum take 0.0005 s each, and so do both ways of the half that a replica updates.
    """
    spec = gpu_platform(gpu_size("gpu", memory_mb=4096, device_mb=4096))
    profile = two_layers(spec, sent_bytes=6_000_000)
    for wire, link_s in ((Wire.FP32, 0.1), (Wire.BF16, 0.05)):
        first, last = evaluate(two_stages(spec, wire=wire), profile, spec).stages
        assert (first.forward_to_host_s, first.forward_upload_s) == pytest.approx((0.0005, 0.04 + link_s))
        assert (last.forward_download_s, last.forward_to_device_s) == pytest.approx((0.04 + link_s, 0.0005))
        assert (last.backward_to_host_s, last.backward_upload_s) == pytest.approx((0.0005, 0.04 + link_s))
        assert (first.backward_download_s, first.backward_to_device_s) == pytest.approx((0.04 + link_s, 0.0005))
        assert not first.forward_to_device_s + first.backward_to_host_s + last.forward_to_host_s
    large = replace(profile, layers=tuple(replace(layer, parameter_bytes=6_000_000) for layer in profile.layers))
    on_cpu = replace(spec, sizes=tuple(replace(size, accelerator=None) for size in spec.sizes))
    for shard, times in ((False, 2), (True, 3)):
        plan = two_stages(spec, replicas=2, shard_optimizer=shard)
        crossed, plain = (evaluate(plan, large, one).stages[0].sync_s for one in (spec, on_cpu))
        assert crossed - plain == pytest.approx(times * 0.0005)


@pytest.mark.parametrize(("replicas", "shard"), [(1, False), (2, False), (2, True)])
def test_the_simulated_plan_takes_the_seconds_of_the_closed_form(replicas: int, shard: bool) -> None:
    profile = two_layers(SLOW, sent_bytes=60_000_000)
    profile = replace(profile, layers=tuple(replace(layer, parameter_bytes=10**8) for layer in profile.layers))
    plan = two_stages(SLOW, replicas=replicas, micro_batches=4, sync=Sync.THREE_PHASE, shard_optimizer=shard)
    expected = evaluate(plan, profile, SLOW)
    assert predict(plan, profile, SLOW).duration_s == pytest.approx(expected.iteration_s, rel=1e-9)


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "expected_s"),
    [
        (ScheduleKind.GPIPE, 4, 8.08 + 3 * 2 + 10.08 + 3 * 2),
        (ScheduleKind.ONE_F_ONE_B, 2, 8.08 + 10.08 + 3),
        (ScheduleKind.EAGER_ONE_F_ONE_B, 4, 8.08 + 10.08 + 3 * 18.16 / 3),
    ],
)
def test_link_bus_and_computation_work_beside_each_other(
    schedule: ScheduleKind, micro_batches: int, expected_s: float
) -> None:
    """By hand: 60 MB take 2 s of the bus and 1.04 s of the link, on either side of the store; forwards take 1 s,
    backwards 2 s. So a micro-batch is there after 1 + 2 + 1.04 + 1.04 + 2 + 1 = 8.08 s, and back 10.08 s later. Under
    GPipe the others follow at the pace of the bus each way. Under 1F1B the second one follows by the 3 s that a stage
    computes; under eager 1F1B the first stage holds 3, so the fourth starts when the first is back, and the pace is a
    third of that.
    """
    profile = two_layers(SLOW, sent_bytes=60_000_000)
    plan = two_stages(SLOW, micro_batches=micro_batches, schedule=schedule)
    assert evaluate(plan, profile, SLOW).iteration_s == pytest.approx(expected_s, rel=1e-9)
    assert predict(plan, profile, SLOW).duration_s == pytest.approx(expected_s, rel=1e-9)


BUSES_GB_S = (0.01, 0.03, 0.1, 12.0)


@given(st.data())
def test_a_chain_takes_exactly_the_time_of_the_cost_model_whatever_its_buses(data: st.DataObject) -> None:
    gpus = (
        gpu_size(f"gpu{i}", memory_mb=8192, device_mb=8192, bus_gb_s=data.draw(st.sampled_from(BUSES_GB_S)))
        for i in range(2)
    )
    spec = gpu_platform(*gpus, cpus=1)
    layers = data.draw(st.integers(1, 5))
    profile = chain(layers, len(spec.sizes), data.draw(st.integers(0, 99)))
    tensors = tuple(replace(tensor, backward_bytes=tensor.forward_bytes) for tensor in profile.tensors)
    profile = replace(profile, sizes=tuple(size.name for size in spec.sizes), tensors=tensors)
    sizes = data.draw(st.lists(st.sampled_from(spec.sizes), min_size=layers, max_size=layers))
    stages = tuple(Stage(first=i, stop=i + 1, size=size.name, memory_mb=size.memory_mb) for i, size in enumerate(sizes))
    wire, micro_batches = data.draw(st.sampled_from([Wire.FP32, Wire.BF16])), data.draw(st.integers(1, 8))
    plan = replace(two_stages(spec), stages=stages, micro_batch=4, global_batch=4 * micro_batches, wire=wire)
    predicted = predict(plan, profile, spec)
    assert predicted.duration_s == pytest.approx(evaluate(plan, profile, spec).iteration_s, rel=1e-9)
    crossing = Counter(event.lane for event in predicted.events)
    on_gpu = [spec.accelerates(stage.size) for stage in stages]
    for lane, sending, receiving in (
        (Resource.TO_HOST, on_gpu[:-1], on_gpu[1:]),
        (Resource.TO_DEVICE, on_gpu[1:], on_gpu[:-1]),
    ):
        assert crossing[lane] == micro_batches * (sum(sending) + sum(receiving))
