import pytest

from funcpipe.errors import InvalidValue, PlatformRefused
from funcpipe.platforms.catalog import is_deployment, is_ray
from funcpipe.platforms.ray.cluster import RayAddress, Via, parse_address


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
