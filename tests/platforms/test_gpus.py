"""GPUs of machines at hand are found without torch, divided, and shared by functions that do not exceed them."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from funcpipe.api import FuncPipe
from funcpipe.client.prepare import session
from funcpipe.core import MB, FunctionSize, Plan
from funcpipe.core.run import FunctionSpec
from funcpipe.errors import PlatformError, PlatformRefused
from funcpipe.platforms import entry
from funcpipe.platforms.base import Invoked
from funcpipe.platforms.catalog import load_spec, offer_at
from funcpipe.platforms.gpus import VISIBLE, FunctionGpu, check_room, model_named, placed_on, read_gpus
from funcpipe.platforms.local.platform import local_functions
from funcpipe.platforms.room import Node, Offer, with_gpus
from tests.e2e import small
from tests.support import stand_in
from tests.support.stand_in_device import NAME
from tests.support.waiting import wait_until

ANSWER = """\
0, GPU-5a3b1c2d-0000-1111-2222-333344445555, Tesla T4, 15360, [N/A]
1, GPU-6b4c2d3e-0000-1111-2222-333344445555, NVIDIA L4, 23034, [N/A]
2, GPU-7c5d3e4f-0000-1111-2222-333344445555, NVIDIA A100-SXM4-80GB, 81920, Disabled
3, GPU-8d6e4f5a-0000-1111-2222-333344445555, NVIDIA A100-SXM4-80GB, 81920, Enabled
4, GPU-9e7f5a6b-0000-1111-2222-333344445555, Quadro P400, 2048, [N/A]
"""
"""What nvidia-smi answers, in the form that `nvidia-smi --help-query-gpu` documents: the last two are not usable."""

T4, L4, A100 = "GPU-5a3b1c2d-0000-1111-2222-333344445555", "GPU-6b4c", "GPU-7c5d"


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have an nvidia-smi on the path that answers with a text."""

    def install(text: str) -> None:
        (tmp_path / "answer").write_text(text)
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\ncat {tmp_path}/answer\n")
        (tmp_path / "nvidia-smi").chmod(0o700)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.delenv(VISIBLE, raising=False)

    return install


def test_the_tool_s_answer_is_read() -> None:
    found = read_gpus(ANSWER)
    assert [(gpu.model.name, gpu.free_mb, gpu.usd_h) for gpu in found] == [
        ("T4", 15360, 0.526),
        ("L4", 23034, 0.8048),
        ("A100-80", 81920, 2.5),
    ]
    assert found[0].label == T4
    assert read_gpus("") == read_gpus("0, GPU-1, NVIDIA L4, [N/A], [N/A]\n") == ()


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("1,0", ["L4", "T4"]),
        (f"{L4},{A100}", ["L4", "A100-80"]),
        ("0,9,1", ["T4"]),
        ("0,0,1", ["T4"]),
        ("", []),
        ("-1", []),
        ("4,1", ["L4"]),
    ],
)
def test_a_process_sees_what_its_environment_says(visible: str, names: list[str]) -> None:
    assert [gpu.model.name for gpu in read_gpus(ANSWER, visible)] == names


def test_models_are_known_by_the_names_of_the_driver() -> None:
    names = ["NVIDIA A10G", "NVIDIA A10", "NVIDIA H100 80GB HBM3", "Tesla V100-SXM2-16GB", "NVIDIA L40S", "A100"]
    found = [model_named(name) for name in names]
    assert [model.name for model in found if model] == ["A10G", "A10", "H100", "V100", "L40S", "A100"]
    assert model_named("NVIDIA GeForce GTX 1080") is None


def test_sizes_with_a_gpu_are_offered_where_the_machine_has_one(
    tool: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = load_spec("local").sizes
    assert all(size.accelerator is None for size in before)
    tool("".join(ANSWER.splitlines(keepends=True)[1:2]))
    monkeypatch.setattr("funcpipe.platforms.catalog.usable_memory_bytes", lambda: 5000 * MB)
    sizes = {size.name: size for size in load_spec("local").sizes}
    assert [*sizes][:3] == ["1024MB", "2048MB", "4096MB"]
    assert [*sizes][3:] == ["4096MB-L4", "4096MB-L4-1of2", "4096MB-L4-1of4"]
    quarter = sizes["4096MB-L4-1of4"].accelerator
    assert quarter is not None
    assert (quarter.memory_mb, quarter.fp32_tflop_s, quarter.bf16_tflop_s) == (5758, 15, 30.25)
    assert sizes["4096MB-L4"].price_usd_s == pytest.approx(0.8048 / 3600)
    assert sizes["4096MB-L4-1of4"].price_usd_s == pytest.approx(max(0.8048 / 3600 / 4, sizes["4096MB"].price_usd_s))
    offer = offer_at("local")
    assert offer.has_room(small_plan("4096MB-L4"))
    assert not offer.has_room(small_plan("4096MB-L4", "1024MB")), "the host has not both"


def small_plan(*sizes: str) -> Plan:
    plan = small.plan(len(sizes), 1)
    return replace(plan, stages=tuple(replace(s, size=size) for s, size in zip(plan.stages, sizes, strict=True)))


T4S = tuple(replace(read_gpus(ANSWER)[0], label=label) for label in ("first", "second"))
SPEC = with_gpus(load_spec("local"), [Node(cpus=math.inf, memory_bytes=math.inf, gpus=T4S)])
PARTS = [size for size in SPEC.sizes if size.accelerator and size.memory_mb == 4096]


@given(st.lists(st.sampled_from(PARTS), max_size=12), st.randoms())
def test_functions_never_have_more_of_a_gpu_than_it_has(sizes: list[FunctionSize], draw: Any) -> None:
    """Placed and ended in any order; by counting quarters, of which each GPU has four."""
    held = list[FunctionGpu]()
    quarters = dict[str, int](first=0, second=0)
    for size in sizes:
        if held and draw.random() < 0.3:
            gone = held.pop(draw.randrange(len(held)))
            quarters[gone.uuid] -= round(4 * gone.memory_mb / 15360)
        wanted = round(4 * size.accelerator.memory_mb / 15360) if size.accelerator else 0
        if any(used + wanted <= 4 for used in quarters.values()):
            found = placed_on(T4S, SPEC, size.name, beside=held)
            assert found is not None
            quarters[found.uuid] += wanted
            held.append(found)
        else:
            with pytest.raises(
                PlatformError, match=r"no T4 of this machine has \d+ MB left for a function of the size"
            ):
                placed_on(T4S, SPEC, size.name, beside=held)
        assert max(quarters.values()) <= 4


def test_functions_without_a_gpu_are_given_none() -> None:
    assert placed_on(T4S, SPEC, "1024MB", beside=()) is None
    assert placed_on(T4S, SPEC, "a size of another platform", beside=()) is None
    assert placed_on((), SPEC, "4096MB-T4", beside=()) is None


def test_a_plan_that_has_no_room_is_refused_before_it_runs() -> None:
    check_room(small_plan("4096MB-T4", "4096MB-T4-1of2", "4096MB-T4-1of2", "1024MB"), SPEC, T4S)
    with pytest.raises(
        PlatformRefused, match="a GPU, 3 of 4096MB-T4, at once, and this machine has T4 with 15360 MB and"
    ):
        check_room(small_plan("4096MB-T4", "4096MB-T4", "4096MB-T4"), SPEC, T4S)


@given(st.lists(st.sampled_from(SPEC.sizes), min_size=1, max_size=4))
def test_no_plan_of_a_part_of_the_offer_lacks_room(sizes: list[FunctionSize]) -> None:
    others = tuple(replace(gpu, model=replace(gpu.model, name="L4")) for gpu in T4S[:1])
    nodes = (Node(cpus=3, memory_bytes=20_000 * MB, gpus=T4S), Node(cpus=2, memory_bytes=9_000 * MB, gpus=others))
    offer = Offer(spec=with_gpus(SPEC, nodes[1:]), nodes=nodes)
    parts = list(offer.where_all_have_room())
    assert any(size.accelerator for part in parts for size in part.sizes)
    names = {size.name for size in sizes}
    if any(names <= {s.name for s in part.sizes} and len(sizes) <= part.max_functions for part in parts):
        assert offer.has_room(small_plan(*(size.name for size in sizes)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked(FunctionSpec):
    """An invocation of a function of any size."""

    FORMAT: ClassVar[str] = "funcpipe.asked/1"

    worker: str
    size: str
    memory_mb: int = 4096


def test_running_functions_share_gpus_and_one_that_ends_makes_room(tool: Callable[[str], None], tmp_path: Path) -> None:
    tool("".join(ANSWER.splitlines(keepends=True)[:2]))
    base: dict[str, Any] = {"run": "run-1", "attempt": 0, "storage": str(tmp_path), "seed": 0}
    base |= {"bundle_sha256": "0", "message_deadline_s": 1.0}
    half, cpu = "4096MB-T4-1of2", "1024MB"
    with local_functions(load_spec("local"), "tests.platforms.local.gpu_notes:note_gpu") as platform:
        handles = {}
        for name, size in (("a", half), ("b", half), ("c", "4096MB-L4"), ("d", cpu)):
            handles[name] = platform.invoke(Asked(worker=name, size=size, **base))
        with pytest.raises(PlatformError, match="no T4 of this machine has 7680 MB left"):
            platform.invoke(Asked(worker="e", size=half, **base))
        platform.stop(handles["a"])
        platform.invoke(Asked(worker="e", size=half, **base))
        names = ["a", "b", "c", "d", "e"]
        wait_until(lambda: all((tmp_path / name).exists() and (tmp_path / name).read_text() for name in names[1:]))
        found = [(tmp_path / name).read_text() for name in names[1:]]
    assert found == [T4, f"{L4}2d3e-0000-1111-2222-333344445555", "none", T4]


SEEN = "FUNCPIPE_TEST_SEEN"


def on_the_stand_in(payload: str, *invoked: Invoked) -> None:
    """Be a function on a machine with the device, and leave a note of the GPU that it was given."""
    stand_in.install()
    entry.main(payload, *invoked)
    used = torch.get_device_module(NAME).max_memory_allocated()
    Path(os.environ[SEEN], str(os.getpid())).write_text(f"{os.environ[VISIBLE]} {used > 0}")


def functions_on_the_stand_in(spec: Any, _: str, **options: Any) -> Any:
    return local_functions(spec, f"{__name__}:{on_the_stand_in.__name__}", **options | {"load": ""})


def trained(plan: Plan) -> Mapping[str, torch.Tensor]:
    torch.manual_seed(1)
    pipe = FuncPipe(small.model(), loss_fn=F.cross_entropy, optimizer=small.optimizer)
    return pipe.train(small.data, plan=plan, rehearse=False).state_dict()


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what functions have seen."""
    folder = tmp_path / "seen"
    folder.mkdir()
    monkeypatch.setenv(SEEN, str(folder))
    return folder


@pytest.mark.long
def test_stages_train_on_parts_of_this_machine_s_gpus(
    tool: Callable[[str], None], seen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trained(small_plan("1024MB", "1024MB"))
    tool("".join(ANSWER.splitlines(keepends=True)[:1]))
    monkeypatch.setattr(session, "local_functions", functions_on_the_stand_in)
    found = trained(small_plan("4096MB-T4-1of2", "4096MB-T4-1of2"))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert [path.read_text() for path in seen.iterdir()] == [f"{T4} True"] * 2
    with pytest.raises(PlatformRefused, match="2 of 4096MB-T4, at once"):
        trained(small_plan("4096MB-T4", "4096MB-T4"))


@pytest.mark.long
def test_the_way_here_trains_on_this_machine_s_gpu(
    tool: Callable[[str], None], seen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a budget it is the fastest. The bits are those of the same plan on processors."""
    tool("".join(ANSWER.splitlines(keepends=True)[:1]))
    pipe = FuncPipe(small.model(), loss_fn=F.cross_entropy, optimizer=small.optimizer)
    pipe.profile(small.sample()[0], platform="local", micro_batch=2, repeats=1)
    (way,) = pipe.provision(small.data, global_batch=8, epochs=1, budget_usd=1.0, ways=("here",)).provisions
    assert way.plan is not None
    assert all(load_spec("local").accelerates(stage.size) for stage in way.plan.stages)
    stages = tuple(replace(stage, size="1024MB", memory_mb=1024) for stage in way.plan.stages)
    expected = trained(replace(way.plan, stages=stages))
    monkeypatch.setattr(session, "local_functions", functions_on_the_stand_in)
    found = trained(way.plan)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert [path.read_text() for path in seen.iterdir()] == [f"{T4} True"] * len(way.plan.stages) * way.plan.replicas
