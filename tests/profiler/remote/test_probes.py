"""Functions that measure, run in the test's own process by a platform that can be told how they end."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from funcpipe.api import FuncPipe
from funcpipe.client.prepare.session import Site
from funcpipe.core import (
    MB,
    Invocation,
    LayerReport,
    MachineReport,
    Plan,
    PlatformSpec,
    ProbeSpec,
    read,
    to_text,
    write,
)
from funcpipe.core.accelerator import Work
from funcpipe.core.logs import RawLine
from funcpipe.errors import DeadlineExceeded, FormatError, InputError, ModelError, WorkerFailed
from funcpipe.platforms import entry, function_group
from funcpipe.platforms.base import Cause, Handle, PlainKeys, State, Status
from funcpipe.platforms.catalog import load_spec, open_storage
from funcpipe.profiler.remote import measuring
from funcpipe.profiler.remote.function import ProbeKeys
from funcpipe.profiler.remote.measuring import Budget, measure_platform, measured, times_of_sizes

DONE = Status(state=State.DONE)
OUT_OF_MEMORY = Status(state=State.FAILED, reason="out of memory: 1 MB", cause=Cause.OUT_OF_MEMORY)
CRASHED = Status(state=State.FAILED, reason="killed by SIGSEGV", cause=Cause.CRASHED)
RUNNING = Status(state=State.RUNNING)


class Clock:
    """A clock that only sleeping moves on."""

    now_s = 1e9

    strftime = staticmethod(time.strftime)

    def time(self) -> float:
        return self.now_s

    monotonic = time

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture(autouse=True)
def _nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    for module in (measuring, function_group):
        monkeypatch.setattr(module, "time", clock)


def work(probe: ProbeSpec) -> Status:
    entry.main(to_text(probe))
    return DONE


@dataclass
class Scripted(PlainKeys):
    """A platform on which `act` does what a function would, and says how it ended."""

    spec: PlatformSpec
    act: Callable[[ProbeSpec], Status] = work
    url: str = "here://"
    probes: list[ProbeSpec] = field(default_factory=list)
    statuses: dict[Handle, Status] = field(default_factory=dict)
    stopped: list[Handle] = field(default_factory=list)

    def check(self, plan: Plan, *, run_s: float | None = None) -> None:
        raise AssertionError("nothing is planned")

    def invoke(self, worker: Invocation) -> Handle:
        assert isinstance(worker, ProbeSpec)
        handle = Handle(worker=worker.worker, name=str(len(self.probes)))
        self.probes.append(worker)
        self.statuses[handle] = self.act(worker)
        return handle

    def status(self, handle: Handle) -> Status:
        return self.statuses[handle]

    def stop(self, handle: Handle) -> None:
        self.stopped.append(handle)

    def logs(self, run: str) -> tuple[RawLine, ...]:
        return ()

    def detach(self) -> None:
        raise AssertionError("nobody detaches")


def spec(**changes: object) -> PlatformSpec:
    aws = load_spec("aws-lambda")
    small = replace(aws, sizes=aws.sizes[:2], cold_start_s=0.0)
    return replace(small, **changes)  # type: ignore[arg-type]


def site(folder: Path, platform: Scripted) -> Site:
    return Site(platform, open_storage(folder.as_uri()), folder.as_uri())


def pipe() -> FuncPipe:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return FuncPipe(model, loss_fn=F.cross_entropy, optimizer=torch.optim.SGD, name="small")


def layer_report(forward_s: float, backward_s: float, workspace_bytes: int = 0) -> LayerReport:
    work = Work(flop=1, dense_bytes=2, other_bytes=3)
    return LayerReport(
        forward_s=(forward_s,),
        backward_s=(backward_s,),
        workspace_bytes=workspace_bytes,
        forward_work=work,
        backward_work=work,
    )


def write_report(folder: Path, probe: ProbeSpec, layer: int, seconds: float) -> None:
    report = layer_report(seconds, 2 * seconds, workspace_bytes=layer)
    open_storage(folder.as_uri()).put(ProbeKeys(probe.run).layer(probe.size, layer), to_text(report).encode())


def test_layers_are_timed_in_functions_of_every_size(tmp_path: Path) -> None:
    platform = Scripted(spec())
    found = pipe().profile(
        torch.zeros(2, 4), micro_batch=2, on=site(tmp_path, platform), sample_target=torch.zeros(2).long()
    )
    assert not found.estimated
    assert found.platform == "aws-lambda"
    assert found.sizes == ("1024MB", "2048MB")
    assert all(len(layer.forward_s) == 2 and min(layer.forward_s) > 0 for layer in found.layers)
    assert [(probe.size, probe.memory_mb) for probe in platform.probes] == [("1024MB", 1024), ("2048MB", 2048)]
    assert open_storage(tmp_path.as_uri()).list("") == ()
    here = pipe().profile(torch.zeros(2, 4), micro_batch=2, platform=spec(), sample_target=torch.zeros(2).long())
    assert here.estimated
    assert [layer.name for layer in here.layers] == [layer.name for layer in found.layers]
    assert [layer.activation_bytes for layer in here.layers] == [layer.activation_bytes for layer in found.layers]


def test_a_layer_too_large_for_a_size_is_passed_over_and_the_rest_measured(tmp_path: Path) -> None:
    def act(probe: ProbeSpec) -> Status:
        for layer in probe.layers:
            if (probe.size, layer) == ("1024MB", 1):
                return OUT_OF_MEMORY
            write_report(tmp_path, probe, layer, 1.0 if probe.size == "1024MB" else 0.25)
        return DONE

    platform = Scripted(spec(), act)
    found = pipe().profile(torch.zeros(2, 4), micro_batch=2, on=site(tmp_path, platform))
    assert [(probe.size, probe.layers) for probe in platform.probes] == [
        ("1024MB", (0, 1, 2)),
        ("2048MB", (0, 1, 2)),
        ("1024MB", (2,)),
    ]
    scaled = 0.25 * platform.spec.sizes[1].vcpu / platform.spec.sizes[0].vcpu
    assert [layer.forward_s for layer in found.layers] == [
        (1.0, 0.25),
        (pytest.approx(scaled), 0.25),
        (1.0, 0.25),
    ]
    assert found.layers[0].backward_s == (2.0, 0.5)
    assert [layer.workspace_bytes for layer in found.layers] == [0, 1, 2]


def test_what_a_function_has_no_time_for_the_next_one_measures(tmp_path: Path) -> None:
    def act(probe: ProbeSpec) -> Status:
        write_report(tmp_path, probe, probe.layers[0], 1.0)
        return DONE

    platform = Scripted(spec(), act)
    pipe().profile(torch.zeros(2, 4), micro_batch=2, on=site(tmp_path, platform))
    assert [probe.layers for probe in platform.probes] == [(0, 1, 2), (0, 1, 2), (1, 2), (1, 2), (2,), (2,)]
    assert len({probe.number for probe in platform.probes}) == 6


def test_a_function_that_gets_nothing_done_or_fails_ends_the_profile(tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceeded, match=r"a function of 1024MB could not time one layer in 720\.0 s"):
        pipe().profile(torch.zeros(2, 4), on=site(tmp_path, Scripted(spec(), lambda probe: DONE)))
    with pytest.raises(WorkerFailed, match="probe0, a function of 1024MB, killed by SIGSEGV: it left no traceback"):
        pipe().profile(torch.zeros(2, 4), on=site(tmp_path, Scripted(spec(), lambda probe: CRASHED)))
    assert open_storage(tmp_path.as_uri()).list("") == ()


def test_a_function_that_raises_says_why(tmp_path: Path) -> None:
    def act(probe: ProbeSpec) -> Status:
        with pytest.raises(SystemExit):
            entry.main(to_text(replace(probe, code=dict.fromkeys(probe.code, "0"))))
        return replace(CRASHED, reason="ended with exit code 1")

    with pytest.raises(
        WorkerFailed, match=r"(?s)exit code 1: .*CorruptMessage: the code of layer 0 is not the one that the inv"
    ):
        pipe().profile(torch.zeros(2, 4), on=site(tmp_path, Scripted(spec(), act)))


def test_functions_that_take_too_long_are_stopped_and_the_money_suffices(tmp_path: Path) -> None:
    platform = Scripted(spec(cold_start_s=0.0), lambda probe: RUNNING)
    usd = 1.3 * sum(size.price_usd_s for size in platform.spec.sizes)
    with pytest.raises(DeadlineExceeded):
        pipe().profile(torch.zeros(2, 4), on=site(tmp_path, platform), max_usd=usd)
    assert len(platform.stopped) == 2
    assert platform.probes[0].time_s == pytest.approx(0.8 * 1.3, rel=0.02)
    with pytest.raises(InputError, match=r"\$1e-06 is too little: \$0.00 is spent, .* 2 functions of aws-lambda"):
        pipe().profile(torch.zeros(2, 4), on=site(tmp_path, Scripted(spec())), max_usd=1e-6)


def test_a_budget_counts_what_was_spent() -> None:
    budget = Budget(spec(lifetime_s=None, price_invocation_usd=0.0), 10.0)
    small, large = budget._spec.sizes
    price = small.price_usd_s + large.price_usd_s
    assert budget.longest_s([small, large]) == pytest.approx(10 / price)
    budget.spend(small, 4 / small.price_usd_s)
    assert budget.longest_s([small, large]) == pytest.approx(6 / price)
    assert Budget(spec(lifetime_s=100.0), None).longest_s([small]) == 100


def test_a_layer_that_fits_no_size_is_named() -> None:
    times = layer_report(1.0, 1.0)
    assert times_of_sizes(spec(), {"1024MB": times, "2048MB": times}) == [times, times]
    with pytest.raises(ModelError, match="does not fit a function of 2048MB, the largest of aws-lambda"):
        times_of_sizes(spec(), {"1024MB": times})


def report(**changes: float) -> MachineReport:
    plain = MachineReport(
        started_at_s=0.0,
        latency_s=0.03,
        upload_bytes_s=1e7,
        download_bytes_s=2e7,
        base_memory_bytes=200 * MB,
        one_thread_s=0.01,
        all_threads_s=0.005,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_a_measured_specification_says_what_was_measured_and_can_be_read(tmp_path: Path) -> None:
    half, two = (replace(size, vcpu=vcpu) for size, vcpu in zip(spec().sizes, (0.5, 2.0), strict=True))
    reports = {
        half.name: report(one_thread_s=0.02, all_threads_s=0.02, latency_s=0.05),
        two.name: report(base_memory_bytes=300 * MB),
    }
    found = measured(spec(sizes=(half, two)), reports, cold_start_s={half.name: 4.5, two.name: 1.5}, when="2026-11-21")
    assert [size.vcpu for size in found.sizes] == [pytest.approx(0.5), pytest.approx(2.0)]
    assert [size.upload_bytes_s for size in found.sizes] == [1e7, 1e7]
    assert [size.download_bytes_s for size in found.sizes] == [2e7, 2e7]
    assert (found.latency_s, found.cold_start_s, found.base_memory_bytes) == (0.04, 4.5, 300 * MB)
    assert [size.cold_start_s for size in found.sizes] == [4.5, 1.5]
    assert found.sources["vcpu"] == found.sources["latency_s"] == "measured by functions of every size, 2026-11-21"
    assert found.sources["price_usd_s"] == spec().sources["price_usd_s"]
    write(found, tmp_path / "found.json")
    assert read(PlatformSpec, tmp_path / "found.json") == found


def test_the_platform_is_measured_by_a_function_of_each_size(tmp_path: Path) -> None:
    def act(probe: ProbeSpec) -> Status:
        key = ProbeKeys(probe.run).machine(probe.number)
        open_storage(tmp_path.as_uri()).put(key, to_text(report(started_at_s=2e9)).encode())
        return DONE

    platform = Scripted(spec(), act)
    found = measure_platform(platform, open_storage(tmp_path.as_uri()), tmp_path.as_uri())
    assert [probe.size for probe in platform.probes] == ["1024MB", "2048MB"]
    assert found.sizes[0].upload_bytes_s == 1e7
    assert open_storage(tmp_path.as_uri()).list("") == ()
    with pytest.raises(WorkerFailed, match="probe0, 1024MB: out of memory: 1 MB"):
        measure_platform(
            Scripted(spec(), lambda probe: OUT_OF_MEMORY), open_storage(tmp_path.as_uri()), tmp_path.as_uri()
        )


@pytest.mark.parametrize("payload", ["", "[]", "{}", json.dumps({"format": "funcpipe.plan/1"})])
def test_a_payload_that_is_neither_work_nor_a_probe_is_refused(payload: str) -> None:
    with pytest.raises(FormatError, match="the invocation payload: field 'format' is"):
        entry.main(payload)
