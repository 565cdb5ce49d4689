import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from funcpipe.core import to_text, write
from funcpipe.core.texts import url_parts
from funcpipe.errors import FormatError, InvalidValue
from funcpipe.platforms.catalog import is_deployment, load_spec, offer_at, open_deployment, open_storage, spec_names
from funcpipe.platforms.ray.cluster import parse_address


@pytest.mark.parametrize("name", spec_names())
def test_the_specifications_that_ship_can_be_read_and_say_where_they_come_from(name: str) -> None:
    spec = load_spec(name)
    assert spec.name == name
    assert spec.source
    assert spec.as_of


@pytest.mark.parametrize("name", [name for name in spec_names() if name != "local"])
def test_every_value_of_a_cloud_s_specification_has_its_source(name: str) -> None:
    spec = load_spec(name)
    told = {"name", "region", "as_of", "source", "sources", "sizes", "stores", "borrowed"}
    about_all = {item.name for item in fields(spec) if getattr(spec, item.name) is not None} - told
    of_sizes = {item.name for size in spec.sizes for item in fields(size) if getattr(size, item.name) is not None}
    about_sizes = of_sizes - told
    without_a_source = {"contention", "polled"}  # 1 and false, until they are measured
    assert spec.sources.keys() == (about_all | about_sizes) - without_a_source
    assert all(spec.sources.values())


PLANNED_ONLY = ("aliyun-fc-gpu", "google-cloud-run-gpu", "modal")


@pytest.mark.parametrize("name", PLANNED_ONLY)
def test_a_platform_that_can_only_be_planned_for_has_gpus_and_runs_nothing(name: str) -> None:
    assert all(size.accelerator is not None for size in load_spec(name).sizes)
    for url in (name, f"{name}://funcpipe"):
        with pytest.raises(InvalidValue, match="can be planned for, but functions do not run on it yet"):
            open_deployment(url)
        with pytest.raises(InvalidValue, match="can be planned for"):
            offer_at(url)


@pytest.mark.parametrize("name", [name for name in spec_names() if is_deployment(name)])
def test_every_value_of_a_store_has_its_source(name: str) -> None:
    stores = load_spec(name).stores
    assert stores or name in PLANNED_ONLY
    for store in stores:
        assert store.what
        told = {"name", "what", "sources"}
        asked = {item.name for item in fields(store) if getattr(store, item.name) not in (None, 0.0, False)} - told
        free = {"price_put_usd", "price_get_usd"}  # that requests are free is told too
        assert store.sources.keys() == asked | {"latency_s", "durable"} | free
        assert all(store.sources.values())


PLACES = re.compile(r"\b(?:[a-z0-9-]+\.)+(?:com|aws|ai|app|dev|io|net|org)(?:/[\w-]+)?", re.IGNORECASE)
OWN = re.compile(
    r"((.+\.)?amazon\.com|calculator\.aws|(.+\.)?(alibabacloud|aliyun)\.com|cloud\.google\.com|docs\.ray\.io|valkey\.io)(/|$)|"
    r"github\.com/(aws|NVIDIA)$"
)
"""Where those say it themselves whose service or product it is."""


def sources(value: Any, *, within: bool = False) -> Iterator[str]:
    """All texts below `sources`."""
    if isinstance(value, str) and within:
        yield value
    for name, item in value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ()):
        yield from sources(item, within=within or name == "sources")


@pytest.mark.parametrize("name", ["*.json", "regions/*.json", "machines/*.json"])
def test_what_others_than_the_vendor_say_is_marked_as_second_hand(name: str) -> None:
    files = list(Path(str(resources.files("funcpipe.platforms").joinpath("specs"))).glob(name))
    texts = [text for file in files for text in sources(json.loads(file.read_text()))]
    assert len(texts) > 20
    of_others = [text for text in texts if any(not OWN.match(place[0]) for place in PLACES.finditer(text))]
    assert [text for text in of_others if "second-hand" not in text] == []


def test_sizes_follow_the_rules_of_their_clouds() -> None:
    for name, price in (("aws-lambda", 1.66667e-5), ("aws-lambda-arm", 1.33334e-5)):
        for size in load_spec(name).sizes:
            assert 128 <= size.memory_mb <= 10240
            assert size.vcpu == pytest.approx(size.memory_mb / 1769, rel=1e-3)
            assert size.price_usd_s == pytest.approx(size.memory_mb / 1024 * price)
    for size in load_spec("aliyun-fc").sizes:
        assert 1 <= size.memory_mb / 1024 / size.vcpu <= 4
        assert size.memory_mb <= 32768
        assert size.price_usd_s == pytest.approx(2e-5 * size.vcpu + 3e-6 * size.memory_mb / 1024)
        assert 125e6 <= size.upload_bytes_s == size.download_bytes_s <= 625e6


def test_a_source_must_be_of_a_field_there_is() -> None:
    with pytest.raises(InvalidValue, match="sources must name fields of a platform or of its sizes, got 'colour'"):
        replace(load_spec("local"), sources={"colour": "seen"})


def test_local_functions_share_the_processors_of_this_machine() -> None:
    assert load_spec("local").shared_cores == len(os.sched_getaffinity(0))


def test_a_specification_of_one_s_own_is_read_from_its_file(tmp_path: Path) -> None:
    spec = replace(load_spec("aws-lambda"), name="mine", latency_s=0.5)
    write(spec, tmp_path / "mine.json")
    assert load_spec(str(tmp_path / "mine.json")) == spec


@pytest.mark.parametrize("name", ["latency_s", "shared_bytes_s", "price_put_usd", "price_get_usd", "lifetime_s"])
def test_a_specification_says_all_that_plans_depend_on_be_it_that_there_is_no_limit(name: str, tmp_path: Path) -> None:
    document = json.loads(to_text(load_spec("aws-lambda")))
    del document[name]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(document))
    with pytest.raises(FormatError, match=rf"mine\.json: field '{name}' is missing"):
        load_spec(str(path))


def test_an_unknown_platform_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidValue, match=r"must be one of aliyun-fc, .*aws-lambda.*local.*got 'azure'"):
        load_spec("azure")
    with pytest.raises(FormatError):
        load_spec(os.devnull)


BAD_REDIS = ["redis://", "redis://host/x", "redis://host:port", "rediss://host/1?prefix=", "redis://host?database=1"]


@pytest.mark.parametrize(
    "url", ["", "x", "file://", "file://host/folder", "s4://bucket", "s3://", "s3://b?region=", *BAD_REDIS]
)
def test_an_unknown_storage_is_refused(url: str) -> None:
    with pytest.raises(InvalidValue, match=r"must (be a URL,? such as|read (file|s3|rediss?)://)"):
        open_storage(url)


WITH_CREDENTIALS = (
    "s3://me:secret@bucket/prefix",
    "s3://me:sec/secret@bucket/prefix",
    "s3://secret@bucket",
    "s3://bucket/prefix?endpoint=http://me:secret@host:9000&region=r",
    "s3://bucket/prefix?endpoint=http%3A%2F%2Fme%3Asecret%40host&region=r",
    "s3://bucket/prefix?endpoint=me:secret@host",
    "oss://bucket/x?region=r&domain=https://secret@host",
    "default=s3://bucket/runs,messages=s3://bucket?endpoint=http://me:secret@host",
)


@pytest.mark.parametrize("url", WITH_CREDENTIALS)
def test_a_url_with_credentials_is_refused_without_showing_them(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(InvalidValue, match="must not hold credentials; set them in the environment") as refused:
        open_storage(url)
    assert "secret" not in f"{refused.value} {caplog.text}"


def test_credentials_of_redis_have_variables_of_their_own() -> None:
    with pytest.raises(InvalidValue, match="set them in REDIS_USERNAME and REDIS_PASSWORD") as refused:
        open_storage("redis://:secret@host/0")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("url", ["aws-lambda://me:secret@funcpipe", "aliyun-fc://f?endpoint=me:secret@host"])
def test_credentials_in_the_url_of_a_deployment_are_refused_too(url: str) -> None:
    with pytest.raises(InvalidValue, match="must not hold credentials") as refused:
        open_deployment(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["s3://bucket?secret_key=secret", "file:///folder?password=secret", "messages=s3://b?key=secret"]
)
def test_what_is_in_unknown_options_is_not_shown(url: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        open_storage(url)
    assert "=secret" not in str(refused.value)
    assert "…" in str(refused.value)


@pytest.mark.parametrize(
    ("open_url", "url"),
    [(open_storage, "s3://bucket"), (open_deployment, "aws-lambda://f"), (parse_address, "ray://local")],
)
def test_an_option_that_is_given_twice_is_refused(open_url: Callable[[str], object], url: str) -> None:
    with pytest.raises(InvalidValue, match=r"must give each option once, region too, got '.*region=a&region=b'"):
        open_url(f"{url}?region=a&region=b")


@pytest.mark.parametrize("url", ["file:///tmp/me@home/a:b@c", "s3://bucket/me@home"])
def test_a_path_may_hold_what_servers_may_not(url: str) -> None:
    assert url_parts("storage", url)[0].geturl() == url


def test_what_is_no_url_at_all_is_refused() -> None:
    with pytest.raises(InvalidValue, match="storage must be a URL"):
        open_storage("s3://[bucket")


def test_a_storage_opens_by_its_url(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    open_storage(folder.as_uri()).put("k", b"1")
    assert (folder / "k").read_bytes() == b"1"


@pytest.mark.parametrize("name", ["aliyun-fc", "aws-lambda", "aws-lambda-arm"])
def test_a_cloud_s_cold_start_includes_torch_and_is_that_of_its_slowest_size(name: str) -> None:
    spec = load_spec(name)
    starting_s, loading_s = 1.0, 2.3  # of one whole processor, as `sources` says
    expected = [starting_s + loading_s / min(size.vcpu, 1.0) for size in spec.sizes]
    assert [size.cold_start_s for size in spec.sizes] == [pytest.approx(value, abs=0.05) for value in expected]
    assert spec.cold_start_s == max(size.cold_start_s or 0.0 for size in spec.sizes)
    assert "2.3 s" in spec.sources["cold_start_s"]


@pytest.mark.parametrize(("name", "missing_usd"), [("aws-lambda", 4e-07), ("aliyun-fc", 0.0)])
def test_a_request_for_what_is_not_there_costs_what_the_storage_bills(name: str, missing_usd: float) -> None:
    spec = load_spec(name)
    assert spec.request_usd(0, 1) == spec.price_get_usd
    assert spec.request_usd(0, 10, 4) == pytest.approx(6 * spec.price_get_usd + 4 * missing_usd)
