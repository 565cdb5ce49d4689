"""What forwards leave for the next ones, trained in stages: as in one process, for any cut, schedule and mishap."""

import copy
import itertools
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from funcpipe.client.follow.launch import launch
from funcpipe.client.follow.results import Progress, RunResult
from funcpipe.client.prepare.job import Job
from funcpipe.client.prepare.prepared_run import prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import FaultTolerance, Plan, RunSettings, ScheduleKind, Sync, Wire
from funcpipe.errors import PlanError
from funcpipe.model.graph import LayerGraph, trace
from funcpipe.model.split.module_state import write_attributes
from funcpipe.platforms.base import Platform
from funcpipe.platforms.catalog import load_spec, open_platform
from funcpipe.platforms.wrappers import Retried
from funcpipe.testing.faults import FunctionFaults
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform
from funcpipe.training.plain import train_in_one_process
from funcpipe.training.recipe import Recipe
from tests.support.plans import even_stages
from tests.training import stateful

FAULTS = FaultTolerance(heartbeat_s=0.2, lease_s=60.0, checkpoint_steps=2, keep=True)
STARTED = RunSettings(name="run")
SAMPLES = 48

adam = partial(torch.optim.Adam, lr=0.01)


def data() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(2)
    return [(torch.randn(4, generator=draw), torch.tensor(i % 3)) for i in range(SAMPLES)]


@cache
def traced() -> tuple[nn.Module, LayerGraph]:
    model = stateful.model()
    return model, trace(model, (torch.randn(2, 4),))


def plan(
    stages: int, *, recompute: bool = False, schedule: ScheduleKind = ScheduleKind.GPIPE, replicas: int = 1
) -> Plan:
    return Plan(
        global_batch=8,
        micro_batch=2,
        replicas=replicas,
        schedule=schedule,
        sync=Sync.PIPELINED,
        wire=Wire.FP32,
        platform="local",
        stages=even_stages([layer.name for layer in traced()[1].layers], stages, recompute=recompute),
    )


def job(chosen: Plan) -> Job:
    return Job(
        graph=traced()[1],
        plan=chosen,
        recipe=Recipe(loss=nn.functional.cross_entropy, optimizer=adam),
        dataset=data,
        samples=SAMPLES,
        epochs=1,
        seed=0,
        shuffle=True,
        message_deadline_s=300.0,
        prices=load_spec("local"),
    )


@cache
def in_one_process() -> nn.Module:
    model, graph = traced()
    steps = job(plan(1)).batches.epoch(0)
    return train_in_one_process(
        model, graph, data(), steps, recipe=Recipe(loss=nn.functional.cross_entropy, optimizer=adam), seed=0
    )


def train(
    chosen: Plan,
    storage: MemoryStorage,
    *,
    settings: RunSettings = STARTED,
    faults_of: Callable[[int], FunctionFaults] = lambda number: FunctionFaults(),
    on_progress: Callable[[Progress], None] = lambda progress: None,
    reopen: Callable[[str], Platform] = open_platform,
) -> RunResult:
    platform = ThreadPlatform(load_spec("local"), storage, faults_of=faults_of)
    session = session_on(Site(platform, Retried(storage), "memory://here"), reopen=reopen)
    try:
        return launch(prepare(job(chosen), session, faults=FAULTS, settings=settings), on_progress)
    finally:
        platform.stop_all()


def held(model: nn.Module) -> dict[str, Any]:
    """All that the stateful parts of `model` hold."""
    names = {"calls", "temperature", "state", "last", "means", "seen"}
    return {
        f"{path}.{name}": value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name in names
    }


def assert_as_in_one_process(result: RunResult) -> None:
    expected = in_one_process()
    found = copy.deepcopy(traced()[0])
    found.load_state_dict(result.state_dict())
    write_attributes(found, result.attributes)
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], tensor, rtol=1e-5, atol=1e-6, msg=name)
    torch.testing.assert_close(held(found), held(expected), rtol=1e-5, atol=1e-6)
    assert held(found)["1.calls"] == SAMPLES // 2
    assert held(found)["5.last"].maxlen == 3


def test_only_what_is_carried_becomes_a_block() -> None:
    carried = traced()[1].carried
    assert carried.blocks == ("1", "2", "3", "5")
    assert carried.attributes == ("1.calls", "2.temperature", "3.state", "5.last", "5.means", "5.seen")
    assert carried.buffers == ("4.average",)
    assert any("one replica" in note for note in traced()[1].notes)


@pytest.mark.parametrize(
    ("stages", "recompute", "schedule"),
    [
        (1, False, ScheduleKind.GPIPE),
        (2, True, ScheduleKind.ONE_F_ONE_B),
        (3, False, ScheduleKind.ONE_F_ONE_B),
        (3, True, ScheduleKind.GPIPE),
        (4, True, ScheduleKind.EAGER_ONE_F_ONE_B),
        (6, False, ScheduleKind.GPIPE),
    ],
)
def test_stages_train_as_one_process(stages: int, recompute: bool, schedule: ScheduleKind) -> None:
    assert_as_in_one_process(train(plan(stages, recompute=recompute, schedule=schedule), MemoryStorage()))


@pytest.mark.parametrize("moment", [40, 90, 120])
def test_killed_functions_are_replaced_with_what_they_had_left(moment: int) -> None:
    faults = itertools.cycle([FunctionFaults(), FunctionFaults(killed_at=moment)])
    chosen = plan(3, recompute=moment == 90, schedule=ScheduleKind.ONE_F_ONE_B)
    first = [next(faults) for _ in range(3)]
    result = train(chosen, MemoryStorage(), faults_of=lambda n: first[n] if n < 3 else FunctionFaults())
    assert result.bill.functions > 3
    assert_as_in_one_process(result)


@pytest.mark.parametrize("stages", [1, 3, 4])
def test_a_run_goes_on_under_another_plan(stages: int) -> None:
    storage = MemoryStorage()
    platform = ThreadPlatform(load_spec("local"), storage)
    session = session_on(Site(platform, Retried(storage), "memory://here"))

    def leave(progress: Progress) -> None:
        if progress.step == 3:
            platform.stop_all()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch(prepare(job(plan(3)), session, faults=FAULTS, settings=RunSettings(name="run")), leave)
    result = train(plan(stages), storage, settings=RunSettings(resume="run"), reopen=platform.open)
    assert_as_in_one_process(result)


def test_a_plan_with_replicas_is_refused_before_anything_is_written() -> None:
    storage = MemoryStorage()
    with pytest.raises(
        PlanError, match=r"2 replicas, but each forward of Sequential leaves 1\.calls, .*replicas=\(1,\)"
    ):
        train(plan(2, replicas=2), storage)
    assert storage.list("") == ()
