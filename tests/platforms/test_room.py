"""The room that machines at hand have for functions: on Ray's nodes, and on this machine."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.core import MB, FunctionSize, Plan, ScheduleKind, Stage, Sync, Wire
from funcpipe.platforms import catalog
from funcpipe.platforms.catalog import load_spec, offer_at, profiled_spec
from funcpipe.platforms.process import usable_memory_bytes
from funcpipe.platforms.room import Node, Offer, of_nodes
from tests.partitioner.instances import chain

RAY = load_spec("ray")


def node(cpus: float, memory_mb: int) -> Node:
    return Node(cpus=cpus, memory_bytes=memory_mb * MB)


def plan_of(*names: str, replicas: int = 1) -> Plan:
    """A stage for each name of a size."""
    return Plan(
        global_batch=replicas,
        micro_batch=1,
        replicas=replicas,
        schedule=ScheduleKind.GPIPE,
        sync=Sync.PIPELINED,
        wire=Wire.FP32,
        stages=tuple(Stage(first=n, stop=n + 1, size=name, memory_mb=1) for n, name in enumerate(names)),
    )


def test_sizes_are_those_that_fit_on_a_node() -> None:
    found = of_nodes(RAY, [node(2, 4096), node(1, 8192)], shared_cores=3)
    assert [size.name for size in found.sizes] == ["1vCPU-1024MB", "1vCPU-2048MB", "1vCPU-4096MB", "2vCPU-4096MB"]
    assert found.shared_cores == 3
    assert [size.name for size in of_nodes(RAY, [], shared_cores=None).sizes] == ["1vCPU-1024MB"]


def test_a_plan_has_room_if_all_its_functions_have_at_once() -> None:
    offer = Offer(spec=RAY, nodes=(node(2, 4096), node(1, 2048)))
    assert offer.has_room(plan_of("1vCPU-2048MB", "2vCPU-4096MB"))
    assert not offer.has_room(plan_of("2vCPU-4096MB", replicas=2))
    assert not offer.has_room(plan_of("16vCPU-65536MB"))
    assert not offer.has_room(plan_of("a size of other platforms"))
    assert Offer(spec=RAY).has_room(plan_of("16vCPU-65536MB", replicas=2))


def test_parts_of_an_offer_are_sizes_and_as_many_functions_as_have_room() -> None:
    found = Offer(spec=RAY, nodes=(node(2, 8192), node(1, 2048))).where_all_have_room()
    assert [(part.sizes[-1].name, len(part.sizes), part.max_functions) for part in found] == [
        ("2vCPU-8192MB", 5, 1),
        ("1vCPU-4096MB", 3, 2),
        ("1vCPU-2048MB", 2, 3),
    ]


@given(
    st.lists(st.builds(node, st.integers(0, 9), st.integers(0, 20_000)), max_size=4),
    st.lists(st.sampled_from(RAY.sizes), min_size=1, max_size=5),
)
def test_no_plan_of_a_part_lacks_room_and_each_function_alone_is_in_one(
    nodes: list[Node], sizes: list[FunctionSize]
) -> None:
    offer = Offer(spec=RAY, nodes=tuple(nodes))
    parts = list(offer.where_all_have_room())
    plan = plan_of(*(size.name for size in sizes))
    in_one = [part for part in parts if {*sizes} <= {*part.sizes} and plan.workers <= part.max_functions]
    assert not in_one or offer.has_room(plan)
    if len(sizes) == 1:
        assert bool(in_one) == offer.has_room(plan)


def test_this_machine_has_all_processors_for_each_function_and_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "usable_memory_bytes", lambda: 6000 * MB)
    offer = offer_at("local")
    assert [size.name for size in offer.spec.sizes] == ["1024MB", "2048MB", "4096MB"]
    assert offer.nodes == (Node(cpus=math.inf, memory_bytes=6000 * MB),)
    assert offer.has_room(plan_of("1024MB", "4096MB"))
    assert not offer.has_room(plan_of("2048MB", "4096MB"))
    assert offer_at("aws-lambda").nodes is None


def test_the_memory_of_a_container_is_its_limit(tmp_path: Path) -> None:
    for name, text in (("none", "max\n"), ("small", "1048576\n")):
        (tmp_path / name).write_text(text)
    machine = usable_memory_bytes([str(tmp_path / "none"), str(tmp_path / "missing")])
    assert machine > 2**28
    assert usable_memory_bytes([str(tmp_path / "small")]) == 2**20


def test_a_profile_is_planned_for_the_sizes_that_it_was_measured_on() -> None:
    profile = replace(chain(4, 2, 0), platform="aws-lambda")
    assert [size.name for size in profiled_spec(profile).sizes] == ["1024MB", "2048MB"] == [*profile.sizes]
    other = replace(profile, sizes=("small", "large"))
    assert profiled_spec(other).sizes == load_spec("aws-lambda").sizes
