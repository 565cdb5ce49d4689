"""A warm-up leaves no trace, and runs no code of a user's; a stage that is loaded before is the one that is read."""

import ctypes
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from funcpipe.client.follow.launch import upload
from funcpipe.core import WorkerSpec
from funcpipe.core.start import StartPart
from funcpipe.model.draws import generator_states
from funcpipe.model.graph import trace
from funcpipe.model.split import split
from funcpipe.model.tensors import one_thread
from funcpipe.platforms.base import Invoked, Storage
from funcpipe.runstate.keys import Keys
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.training.device import Device
from funcpipe.training.stage_job import LoadedStage, load_bundle
from funcpipe.training.warm_up import warm_up
from tests.e2e import small
from tests.e2e.plans import even_plan
from tests.in_process import make_job, prepared_run, run_workers, states
from tests.support.run_keys import NONCE, signed_for_tests


def network() -> nn.Module:
    """With running statistics, a draw, and a value that is received and needs a gradient."""
    head = nn.Linear(144, 8), nn.Linear(8, 3)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), *head)


def test_a_warm_up_leaves_stages_and_generators_as_they_were() -> None:
    torch.manual_seed(0)
    graph, calls = trace(network(), (torch.rand(4, 1, 8, 8),)), list[int]()
    for stage in split(graph, [(0, 3), (3, len(graph.layers))]):
        stage.train()
        before = {name: tensor.clone() for name, tensor in stage.state_dict().items()}
        drawn = generator_states()
        for parameter in stage.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: calls.append(1))  # type: ignore[no-untyped-call]
        assert warm_up(stage, graph.signature, seed=3)
        assert all(torch.equal(before[name], tensor) for name, tensor in stage.state_dict().items())
        assert all(parameter.grad is None for parameter in stage.parameters())
        assert generator_states() == drawn
    assert calls == []


def test_a_thread_that_warms_up_computes_with_as_many_threads_as_torch_was_told() -> None:
    """OpenMP lets each new thread compute with all processors, until torch tells it otherwise."""
    graph, found = trace(nn.Linear(8, 3), (torch.rand(4, 8),)), list[int]()

    class Asked(Device):
        def to_device(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            found.append(ctypes.CDLL(None).omp_get_max_threads())
            return super().to_device(tensors)

    with one_thread(), ThreadPoolExecutor(1) as threads:
        (stage,) = split(graph, [(0, 1)])
        asked = Asked(torch.device("cpu"))
        assert threads.submit(warm_up, stage, graph.signature, seed=0, device=asked).result()
    assert found == [1]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


def hooked() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda module, args, output: None)
    return layer


@pytest.mark.parametrize("block", [Counting, hooked])
def test_code_of_a_user_is_not_run_to_warm_up(block: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), block(), nn.Linear(4, 4))
    graph = trace(model, (torch.rand(2, 4),))
    (stage,) = split(graph, [(0, len(graph.layers))])
    assert not warm_up(stage, graph.signature, seed=0)


def test_what_cannot_be_run_on_zeros_is_not_warmed_up() -> None:
    class Inverse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            inverse: Tensor = torch.linalg.inv(x)
            return inverse

    graph = trace(nn.Sequential(Inverse(), nn.Linear(3, 3)), (torch.eye(3),))
    (stage,) = split(graph, [(0, len(graph.layers))])
    assert not warm_up(stage, graph.signature, seed=0)


def uploaded(storage: Storage, run: str, seed: int) -> WorkerSpec:
    torch.manual_seed(seed)
    plan = even_plan(model := small.model(), small.sample(), stages=1, replicas=1, micro_batch=2, micro_batches=2)
    job = make_job(model, plan, small.data, loss=F.cross_entropy, optimizer=small.optimizer)
    (spec,) = upload(prepared_run(job, storage), Keys(run, 0, NONCE))
    return spec


def test_a_template_s_stage_serves_runs_of_the_same_code_with_their_own_tensors() -> None:
    storage = MemoryStorage()
    first, second = uploaded(storage, "run-1", 0), uploaded(storage, "run-2", 1)
    assert first.bundle_sha256 == second.bundle_sha256
    signed = signed_for_tests(storage)
    for spec in (first, second):
        template = LoadedStage.read(first, signed, base="")  # a process that is forked from it uses it once
        invoked = Invoked(template=template)
        stage, _ = load_bundle(spec, signed, invoked, base="")
        fresh, _ = load_bundle(spec, signed, Invoked(), base="")
        assert stage is template.stage
        assert StartPart.CODE.value not in invoked.start.times.parts
        expected = fresh.state_dict()
        assert all(torch.equal(expected[name], tensor) for name, tensor in stage.state_dict().items())
    stage, _ = load_bundle(first, signed, Invoked(template="another thing"), base="")
    assert stage is not template.stage


def test_runs_have_the_same_bits_with_warm_ups_of_all_their_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))
        plan = even_plan(model, small.sample(), stages=2, replicas=2, micro_batch=2, micro_batches=2)
        job = make_job(model, plan, small.data, loss=F.cross_entropy, optimizer=small.optimizer)
        return states(run_workers(job, MemoryStorage()))

    monkeypatch.setattr("funcpipe.worker.loop.Worker._must_wait", lambda worker: False)
    without, warmed = trained(), list[bool]()

    def noted(*args: Any, **options: Any) -> bool:
        warmed.append(warm_up(*args, **options))
        return warmed[-1]

    monkeypatch.setattr("funcpipe.worker.setup.warm_up", noted)
    monkeypatch.setattr("funcpipe.worker.loop.Worker._must_wait", lambda worker: True)
    found = trained()
    assert warmed == [True] * 4
    assert all(torch.equal(without[name], found[name]) for name in without)
