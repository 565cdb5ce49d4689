"""What the client does about functions that are too small, or whose GPU is."""

from dataclasses import replace
from typing import Any

import pytest

from funcpipe.core import (
    FaultTolerance,
    OnOutOfMemory,
    Outcome,
    PlatformSpec,
)
from funcpipe.errors import WorkerFailed
from funcpipe.platforms.base import Cause, State, Status
from funcpipe.runstate.documents import put_document
from funcpipe.runstate.generations import load_worker_specs
from tests.client.scripted import KEYS, Run, Scripted, spec_with
from tests.in_process import GPU
from tests.run_documents import REPORT

DONE, FAILED = Status(state=State.DONE), Status(state=State.FAILED, reason="killed by SIGKILL")


def test_a_stage_that_grows_is_priced_in_every_later_function_s_account_of_the_run() -> None:
    run = Run()
    supervisor = run.start()
    run.platform.out_of_memory("s1.r0-0")
    supervisor.poll()
    again = run.platform.invoked[-1]
    assert (again.worker, again.attempt, again.size) == ("s1.r0", 0, "2048MB")
    assert again.account.usd_s == pytest.approx(2048e-8)
    assert again.account.run_usd_s == pytest.approx(2 * (1024 + 2048 + 1024) * 1e-8)
    for spec in load_worker_specs(run.storage, KEYS):  # by which others restart workers
        assert spec.account.run_usd_s == pytest.approx(again.account.run_usd_s)
        assert spec.account.usd_s == pytest.approx((2048 if spec.stage == 1 else 1024) * 1e-8)


def test_a_stage_grows_to_a_size_that_is_deployed() -> None:
    run = Run(platform=Scripted(deployed_mb=(1024, 4096)))
    supervisor = run.start()
    run.platform.out_of_memory("s1.r0-0")
    supervisor.poll()
    assert run.platform.invoked[-1].size == "4096MB"


def test_a_stage_that_no_deployed_function_is_larger_for_ends_the_run_and_says_so() -> None:
    run = Run(platform=Scripted(deployed_mb=(1024,)))
    supervisor = run.start()
    run.platform.out_of_memory("s1.r0-0")
    said = r"ran out of memory: .* no larger function can run there \(2048MB: there is no function of 2048 MB; 4096MB: "
    with pytest.raises(WorkerFailed, match=said):
        supervisor.poll()


def test_replicas_that_run_out_of_memory_together_grow_their_stage_once() -> None:
    run = Run()
    supervisor = run.start()
    run.platform.out_of_memory("s1.r0-0")
    run.platform.out_of_memory("s1.r1-0")
    supervisor.poll()
    assert [spec.size for spec in run.platform.invoked[6:]] == ["2048MB", "2048MB"]


def test_a_stage_grows_to_the_least_size_with_room_for_what_any_replica_was_measured_to_use() -> None:
    run = Run()
    supervisor = run.start()
    run.platform.ended["s1.r0-0"] = Status(
        state=State.FAILED, cause=Cause.OUT_OF_MEMORY, reason="out of memory", peak_bytes=2000 << 20
    )
    supervisor.poll()
    assert run.platform.invoked[-1].size == "4096MB"


def test_a_stage_that_needs_more_than_the_largest_function_ends_the_run_with_the_numbers() -> None:
    run = Run()
    supervisor = run.start()
    run.platform.ended["s1.r0-0"] = Status(
        state=State.FAILED, cause=Cause.OUT_OF_MEMORY, reason="out of memory", peak_bytes=4000 << 20
    )
    said = r"peak 4000 of 1024 MB; no larger .* 4096MB: 4096 MB is less than 4500 MB, the peak and an eighth in reserve"
    with pytest.raises(WorkerFailed, match=said):
        supervisor.poll()


def test_a_client_that_comes_later_grows_a_stage_once_for_replicas_that_were_started_before_it_grew() -> None:
    run = Run()
    first = run.start()
    run.platform.out_of_memory("s1.r0-0")
    first.poll()  # the stage has grown
    del run.platform.ended["s1.r0-0"]  # the new function has this name too
    run.platform.out_of_memory("s1.r1-0")
    supervisor = run.supervisor()
    supervisor.attach(load_worker_specs(run.storage, KEYS))
    supervisor.poll()
    assert [spec.size for spec in run.platform.invoked[6:] if spec.worker == "s1.r1"] == ["2048MB"]


def test_there_is_no_growth_beyond_the_largest_size_or_unless_it_is_wanted() -> None:
    run = Run(platform=Scripted(spec=spec_with((1024,))), faults=FaultTolerance(on_oom=OnOutOfMemory.FAIL))
    supervisor = run.start()
    run.platform.out_of_memory("s1.r0-0")
    with pytest.raises(WorkerFailed, match=r"--set training\.on-oom=grow continues with a larger function"):
        supervisor.poll()


def with_gpus(**sizes: tuple[int, int]) -> PlatformSpec:
    """Sizes by name, with the MB of their host and of their GPU; all GPUs are alike but for that."""
    plain = spec_with().sizes[0]
    made = [
        replace(plain, name=name, memory_mb=host_mb, accelerator=replace(GPU, memory_mb=device_mb))
        for name, (host_mb, device_mb) in sizes.items()
    ]
    return replace(spec_with(), sizes=tuple(sorted(made, key=lambda size: size.memory_mb)))


GPUS = with_gpus(
    **{"1024MB": (1024, 8000), "poor": (512, 12_000), "more": (2048, 8000), "most": (4096, 24_000)},
    next=(1024, 12_000),
    less=(4096, 6000),
)
"""`next` is what a stage on 1024MB grows to when its GPU is used up, `more` when its host is."""


def on_gpus(**options: Any) -> Run:
    platform = Scripted(spec=GPUS, deployed_mb=tuple({size.memory_mb for size in GPUS.sizes}))
    return Run(platform=platform, prices=GPUS, **options)


def exhaust(run: Run, worker: str, peak_mb: int, had_mb: int) -> None:
    """Let the first attempt of a worker end as its GPU has no memory left."""
    run.platform.ended[f"{worker}-0"] = FAILED
    report = replace(REPORT, worker=worker, attempt=0, outcome=Outcome.FAILED, error="out of memory")
    changed = replace(report, out_of_memory=True, peak_device_bytes=peak_mb << 20, exhausted_device_mb=had_mb)
    put_document(run.storage, KEYS.worker_report(worker, 0), changed)


def test_a_stage_whose_gpu_is_used_up_grows_to_the_next_gpu_and_its_replicas_with_it() -> None:
    run = on_gpus()
    supervisor = run.start()
    assert {spec.device_memory_mb for spec in run.platform.invoked} == {8000}
    exhaust(run, "s1.r0", 7900, 8000)
    exhaust(run, "s1.r1", 7800, 8000)
    supervisor.poll()
    found = [(spec.worker, spec.size, spec.device_memory_mb) for spec in run.platform.invoked[6:]]
    assert found == [("s1.r0", "next", 12_000), ("s1.r1", "next", 12_000)]
    known = {spec.worker: spec.device_memory_mb for spec in load_worker_specs(run.storage, KEYS)}
    assert known == {"s0.r0": 8000, "s0.r1": 8000, "s1.r0": 12_000, "s1.r1": 12_000, "s2.r0": 8000, "s2.r1": 8000}


def test_the_gpu_has_room_for_the_peak_of_any_replica_and_an_eighth() -> None:
    run = on_gpus()
    supervisor = run.start()
    run.beat("s1.r1", device_bytes=11_000 << 20)
    exhaust(run, "s1.r0", 7900, 8000)
    supervisor.poll()
    assert run.platform.invoked[-1].size == "most"


def test_a_stage_whose_host_is_used_up_keeps_a_gpu_that_is_as_large() -> None:
    run = on_gpus()
    supervisor = run.start()
    run.platform.out_of_memory("s1.r0-0")
    supervisor.poll()
    assert (run.platform.invoked[-1].size, run.platform.invoked[-1].device_memory_mb) == ("more", 8000)


def test_there_is_no_gpu_beyond_the_largest_and_none_is_taken_unless_that_is_wanted() -> None:
    run = on_gpus(faults=FaultTolerance(on_oom=OnOutOfMemory.FAIL))
    supervisor = run.start()
    exhaust(run, "s1.r0", 7900, 8000)
    with pytest.raises(WorkerFailed, match=r"on its GPU: peak 7900 of 8000 MB; --set training\.on-oom=grow"):
        supervisor.poll()
    only = with_gpus(**{"1024MB": (1024, 8000)})
    run = Run(platform=Scripted(spec=only), prices=only)
    supervisor = run.start()
    exhaust(run, "s1.r0", 7900, 8000)
    with pytest.raises(WorkerFailed, match="peak 7900 of 8000 MB; there is no larger GPU, smaller micro-batches or"):
        supervisor.poll()
