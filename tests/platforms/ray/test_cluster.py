from dataclasses import replace

import pytest

from funcpipe.core import MB, Plan
from funcpipe.errors import InvalidValue, PlatformRefused
from funcpipe.platforms.catalog import is_deployment, is_ray, load_market, load_spec, ray_cluster
from funcpipe.platforms.ray.cluster import (
    RayAddress,
    Via,
    at_prices_of,
    check_plan,
    gpu_request,
    node_of,
    parse_address,
    size_for,
)
from funcpipe.platforms.room import Node, with_gpus
from tests.e2e import small


@pytest.mark.parametrize(
    ("url", "address", "told_to_ray"),
    [
        ("ray", RayAddress(via=Via.LOCAL), None),
        ("ray://", RayAddress(via=Via.LOCAL), None),
        ("ray://local?cpus=4", RayAddress(via=Via.LOCAL, cpus=4), None),
        ("ray://auto", RayAddress(via=Via.AUTO), "auto"),
        ("ray://head:10001", RayAddress(via=Via.CLIENT, endpoint="head:10001"), "ray://head:10001"),
        ("ray://10.0.0.1:6379?via=gcs", RayAddress(via=Via.GCS, endpoint="10.0.0.1:6379"), "10.0.0.1:6379"),
        ("ray://[::1]:6379?via=here", RayAddress(via=Via.HERE, endpoint="[::1]:6379"), "[::1]:6379"),
        (
            "ray://auto?machine=c7i.4xlarge",
            RayAddress(via=Via.AUTO, market="aws", machine="c7i.4xlarge"),
            "auto",
        ),
        (
            "ray://h:1?market=m.json&machine=x&spot=1",
            RayAddress(via=Via.CLIENT, endpoint="h:1", market="m.json", machine="x", spot=True),
            "ray://h:1",
        ),
    ],
)
def test_a_url_names_a_cluster_and_is_written_back(url: str, address: RayAddress, told_to_ray: str | None) -> None:
    assert parse_address(url) == address
    assert parse_address(address.url) == address
    assert address.ray_address == told_to_ray


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ray://head", "must be ray://local, ray://auto, ray://HOST:PORT"),
        ("ray://head:x", "must be ray://local"),
        ("ray://me@head:1", "must not hold credentials"),
        ("ray://head:1/path", "must be ray://local"),
        ("ray://head:1?via=air", "must be ray://local"),
        ("ray://local?via=gcs", "must be ray://local"),
        ("ray://head:1?cpus=4", "must be ray://local"),
        ("ray://local?cpus=0", "must give cpus as a whole number of at least 1"),
        ("ray://auto?market=aws", "must name the machine whose price it is"),
        ("ray://auto?machine=x&spot=yes", "must say spot=1"),
    ],
)
def test_what_is_no_cluster_is_refused(url: str, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        parse_address(url)


def test_others_find_a_cluster_by_its_control_service() -> None:
    assert parse_address("ray://local?cpus=4").connected_at("h:1").url == "ray://h:1?via=here"
    assert parse_address("ray://auto?machine=x").connected_at("h:1").url == "ray://h:1?via=gcs&market=aws&machine=x"
    for url in ("ray://h:10001", "ray://h:1?via=gcs"):
        assert parse_address(url).connected_at("other:1").url == url


def test_no_run_is_left_to_itself_on_a_ray_that_ends_with_its_client() -> None:
    parse_address("ray://auto").check_detachable()
    for url in ("ray://local", "ray://h:1?via=here"):
        with pytest.raises(PlatformRefused, match="start it with `ray start --head`, and use ray://auto"):
            parse_address(url).check_detachable()


def test_platforms_are_told_apart_by_their_names() -> None:
    assert [is_ray(name) for name in ("ray", "ray://x:1", "local", "aws-lambda://ray")] == [True, True, False, False]
    assert [is_deployment(name) for name in ("ray", "local", "aws-lambda")] == [False, False, True]


SPEC = load_spec("ray")


def node(cpus: float, memory_mb: int) -> Node:
    return Node(cpus=cpus, memory_bytes=memory_mb * MB)


def sized(*sizes: tuple[str, int], replicas: int = 2) -> Plan:
    plan = small.plan(len(sizes), replicas)
    stages = [replace(stage, size=size, memory_mb=mb) for stage, (size, mb) in zip(plan.stages, sizes, strict=True)]
    return replace(plan, stages=tuple(stages))


def test_a_size_costs_its_share_of_a_machine() -> None:
    """Of c7i.4xlarge, 16 vCPUs and 32 GB for 0.714 dollars: half of its processors, or half of its memory."""
    found = at_prices_of(SPEC, load_market("aws"), "c7i.4xlarge", spot=False)
    assert found.size("8vCPU-16384MB").price_usd_s == pytest.approx(0.714 / 2 / 3600)
    assert found.size("4vCPU-16384MB").price_usd_s == pytest.approx(0.714 / 2 / 3600)
    assert found.size("16vCPU-32768MB").price_usd_s == pytest.approx(0.714 / 3600)
    assert found.size("4vCPU-8192MB").upload_bytes_s == pytest.approx(781.2e6 / 4)
    assert [size.name for size in found.sizes if size.memory_mb > 32768] == []
    assert found.region == "us-east-1"
    assert "on demand, of a share of c7i.4xlarge in us-east-1" in found.sources["price_usd_s"]


def test_prices_come_with_the_url_and_a_machine_without_a_spot_price_is_refused() -> None:
    address, spec = ray_cluster("ray://auto?machine=c7i.2xlarge&spot=1")
    assert address.market == "aws"
    assert spec.size("8vCPU-16384MB").price_usd_s == pytest.approx(0.1602 / 3600)
    assert all(size.price_usd_s == 0 for size in ray_cluster("ray")[1].sizes)
    with pytest.raises(InvalidValue, match="must have a spot price, and the market aws has none for it"):
        ray_cluster("ray://auto?machine=c7i.4xlarge&spot=1")
    with pytest.raises(InvalidValue, match="machine must be one of"):
        ray_cluster("ray://auto?machine=x1")


def test_a_machine_smaller_than_every_size_is_refused() -> None:
    market = load_market("aws")
    tiny = replace(market.machine("m5.large"), name="tiny", memory_mb=512)
    with pytest.raises(InvalidValue, match="must be as large as the smallest size, 1vCPU-1024MB"):
        at_prices_of(SPEC, replace(market, machines=(tiny,), server="tiny"), "tiny", spot=False)


def test_plans_for_other_platforms_get_the_processors_of_the_smallest_size_with_their_memory() -> None:
    assert size_for(SPEC, "2vCPU-4096MB", 4096) == SPEC.size("2vCPU-4096MB")
    found = size_for(SPEC, "5120MB", 5120)
    assert (found.name, found.vcpu, found.memory_mb) == ("5120MB", 2.0, 5120)
    assert size_for(SPEC, "100GB", 102_400).memory_mb == 102_400


def test_a_plan_that_has_room_is_accepted() -> None:
    check_plan(sized(("1vCPU-1024MB", 1024), ("2vCPU-4096MB", 4096)), SPEC, [node(4, 9000), node(2, 8000)], more="")


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([node(5, 64_000)], "needs 6 CPUs and 10240 MB at once, the cluster has 5 CPUs and 64000 MB on 1 nodes"),
        ([node(6, 10_000)], "no place is left for function 4 of 4, of 1vCPU-1024MB with 1 CPUs; add nodes, or plan"),
        ([node(1, 64_000)] * 6, "no place is left for function 1 of 4, of 2vCPU-4096MB with 2 CPUs"),
        ([], "the cluster has 0 CPUs and 0 MB on 0 nodes"),
    ],
)
def test_a_plan_that_ray_would_queue_for_ever_is_refused(nodes: list[Node], message: str) -> None:
    with pytest.raises(PlatformRefused, match=message):
        check_plan(sized(("1vCPU-1024MB", 1024), ("2vCPU-4096MB", 4096)), SPEC, nodes, more="add nodes")


@pytest.mark.parametrize(
    ("resources", "names", "memory_mb"),
    [
        ({"GPU": 2.0, "accelerator_type:L4": 1.0}, ["L4", "L4"], 22888),
        ({"GPU": 1.0, "accelerator_type:A100": 1.0}, ["A100"], 40960),
        ({"GPU": 1.0, "accelerator_type:A100": 1.0, "accelerator_type:A100-80G": 1.0}, ["A100-80"], 81920),
        ({"GPU": 1.0, "accelerator_type:RTX6000": 1.0}, [], 0),
        ({"GPU": 1.0}, [], 0),
        ({"accelerator_type:L4": 1.0}, [], 0),
    ],
)
def test_gpus_of_nodes_are_those_of_known_types(resources: dict[str, float], names: list[str], memory_mb: int) -> None:
    found = node_of({"CPU": 4.0, "memory": 2.0**33} | resources)
    assert (found.cpus, found.memory_bytes) == (4, 2**33)
    assert [gpu.model.name for gpu in found.gpus] == names
    assert {gpu.free_mb for gpu in found.gpus} == ({memory_mb} if names else set())


def test_functions_ask_for_their_share_of_a_gpu_of_its_type() -> None:
    nodes = [node_of({"CPU": 8.0, "memory": 2.0**35, "GPU": 1.0, "accelerator_type:A100-80G": 1.0})]
    spec = with_gpus(SPEC, nodes)
    names = {"1vCPU-4096MB": (0, None)} | {
        f"1vCPU-4096MB-A100-80{part}": (share, "A100-80G") for part, share in (("", 1), ("-1of2", 0.5), ("-1of4", 0.25))
    }
    assert {name: gpu_request(spec.size(name), nodes) for name in names} == names
    assert size_for(spec, "4000MB", 4000).accelerator is None, "a plan for another platform gets no GPU"
