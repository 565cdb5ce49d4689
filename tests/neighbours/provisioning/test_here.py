"""The way `here`: functions on the processors and GPUs of this machine, as `local` would run them."""

from dataclasses import replace
from typing import Any

import pytest

from funcpipe.core import MB, ModelProfile
from funcpipe.core.accelerator import Work
from funcpipe.core.provision import Provision
from funcpipe.neighbours.provisioning.compare import provision_table
from funcpipe.platforms.catalog import load_spec, offer_at
from funcpipe.platforms.gpus import read_gpus
from tests.neighbours.provisioning.test_compare import job_of, profile

GPU = read_gpus("0, GPU-6b4c2d3e-0000-1111-2222-333344445555, NVIDIA L4, 23034, [N/A]")
WORK = Work(flop=10**9, dense_bytes=10**6, other_bytes=150 * 10**6)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give this machine so much memory, and such GPUs; at first four functions' and none."""

    def install(memory_mb: int, *gpus: Any) -> None:
        monkeypatch.setattr("funcpipe.platforms.catalog.usable_memory_bytes", lambda: memory_mb * MB)
        monkeypatch.setattr("funcpipe.platforms.catalog.usable_gpus", lambda: gpus)
        monkeypatch.setattr("funcpipe.platforms.catalog.usable_processors", lambda: 4)

    install(4096)
    return install


def counted() -> ModelProfile:
    """The profile with the work of its layers: of a micro-batch 1 ms by an L4's memory, which moves 150 GB/s."""
    layers = (replace(layer, forward_work=WORK, backward_work=WORK) for layer in profile().layers)
    return replace(profile(), layers=tuple(layers))


def found(measured: ModelProfile, spec: str = "aws-lambda", **job: float | None) -> Provision | str:
    table = provision_table(measured, job_of(**job), spec=load_spec(spec), ways=("here",))
    return table.provisions[0] if table.provisions else table.refusals[0].reason


def test_processors_here_compute_as_those_of_functions() -> None:
    """By hand: 64 samples of 0.1 s of a processor each, by one function with one processor, which is the cheapest."""
    one = found(profile())
    assert isinstance(one, Provision)
    assert one.plan is not None
    assert one.plan.estimate is not None
    assert (one.way, one.text, one.plan.platform) == ("here", "1 x 1024MB local", "local")
    assert one.plan.estimate.iteration_s == pytest.approx(6.4)
    assert one.iterations == 625
    assert one.seconds > 625 * 6.4


def test_a_gpu_here_is_taken_where_it_is_cheaper(machine: Any) -> None:
    """By hand: 16 micro-batches of four layers, forward and backward, 1 ms of memory and a 54,000th s of products each,
    take 2 % of the processor's 6.4 s, for 3 times the price of the smallest function with as much memory.
    """
    machine(16384, *GPU)
    one = found(counted())
    assert isinstance(one, Provision)
    assert one.plan is not None
    assert one.plan.estimate is not None
    assert one.text == "1 x 4096MB-L4 local"
    assert one.plan.estimate.iteration_s == pytest.approx(16 * 8 * (1e-3 + 1 / 54_000))
    unknown = found(profile())
    assert isinstance(unknown, Provision)
    assert "L4" not in unknown.text, "how much the layers compute was not counted"


@pytest.mark.parametrize("memory_mb", [1024, 2048, 4096])
def test_functions_here_have_room_at_once(machine: Any, memory_mb: int) -> None:
    """A budget buys the fastest plan: as many functions as there is room for."""
    machine(memory_mb)
    one = found(profile(), budget_usd=5.0)
    assert isinstance(one, Provision)
    assert one.plan is not None
    assert offer_at("local").has_room(one.plan)
    assert one.plan.workers == memory_mb // 1024


def test_where_nothing_here_can_be_reckoned_it_is_said() -> None:
    spec = load_spec("modal")
    measured = counted().on_sizes(spec.name, spec.sizes)
    assert "no seconds of processors, and this machine no GPU" in str(found(measured, "modal"))
    assert "here: no plan for 2 epochs" in str(found(profile(), deadline_s=10.0))


def test_a_gpu_here_does_what_was_profiled_for_other_gpus(machine: Any) -> None:
    spec = load_spec("modal")
    machine(16384, *GPU)
    one = found(counted().on_sizes(spec.name, spec.sizes), "modal")
    assert isinstance(one, Provision)
    assert "L4" in one.text
