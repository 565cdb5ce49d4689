"""Prices and limits by region: those that ship, and what is said where they are not known."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.core import ModelProfile, Plan, PlatformSpec, Stores, TrainingSpec, from_text, read, to_text
from funcpipe.core.platform import PRICED, STORES, RegionPrices, RegionTable, in_region
from funcpipe.errors import InvalidValue
from funcpipe.partitioner.optimize import optimize
from funcpipe.platforms.catalog import load_spec, planned_spec, region_tables

TABLES = list({table.platforms: table for table in region_tables().values()}.values())


@pytest.mark.parametrize(
    ("name", "region", "gb_s", "invocation", "put", "get", "traffic"),
    [
        ("aws-lambda", "us-east-1", 1.66667e-5, 2e-7, 5e-6, 4e-7, 0.09),
        ("aws-lambda", "ap-east-1", 2.292e-5, 2.8e-7, 5e-6, 4e-7, 0.12),
        ("aws-lambda-arm", "ap-east-1", 1.83e-5, 2.8e-7, 5e-6, 4e-7, 0.12),
        ("aws-lambda", "af-south-1", 2.21e-5, 2.7e-7, 6e-6, 4e-7, 0.154),
        ("aws-lambda", "sa-east-1", 1.66667e-5, 2e-7, 7e-6, 5.6e-7, 0.15),
        ("aws-lambda", "eu-central-2", 1.83334e-5, 2.2e-7, 5.4e-6, 4.3e-7, 0.09),
    ],
)
def test_lambda_and_s3_cost_what_their_region_asks(
    name: str, region: str, gb_s: float, invocation: float, put: float, get: float, traffic: float
) -> None:
    spec = load_spec(f"{name}://funcpipe?region={region}")
    assert spec == load_spec(f"{name}?region={region}")
    assert (spec.name, spec.region, spec.prices_note()) == (name, region, "")
    assert [size.price_usd_s for size in spec.sizes] == pytest.approx([gb_s * s.memory_mb / 1024 for s in spec.sizes])
    found = spec.price_invocation_usd, spec.price_put_usd, spec.price_get_usd, spec.price_traffic_usd_gb
    assert found == (invocation, put, get, traffic)


@pytest.mark.parametrize(
    ("region", "gbit_s"),
    [("ap-southeast-1", 20), ("cn-hangzhou", 20), ("cn-qingdao", 10), ("us-west-1", 5), ("ap-northeast-2", 2)],
)
def test_functions_share_the_bandwidth_of_oss_in_their_region(region: str, gbit_s: float) -> None:
    assert load_spec(f"aliyun-fc?region={region}").shared_bytes_s == gbit_s * 1e9 / 8


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("aws-lambda?region=mx-central-1", "prices of mx-central-1 are not known; those of us-east-1 are used"),
        ("aws-lambda?region=cn-north-1", "prices of cn-north-1 are not known; those of us-east-1 are used"),
        (
            "aws-lambda?region=il-central-1",
            "not all prices of il-central-1 are known; those of us-east-1 are used for functions, invocations and "
            "traffic",
        ),
        (
            "aws-lambda-arm?region=us-gov-east-1",
            "not all prices of us-gov-east-1 are known; those of us-east-1 are used for functions and invocations",
        ),
        (
            "aliyun-fc?region=us-west-1",
            "not all prices of us-west-1 are known; those of ap-southeast-1 are used for functions, invocations and "
            "requests",
        ),
        (
            "aliyun-fc?region=ap-southeast-6",
            "prices and bandwidth of ap-southeast-6 are not known; those of ap-southeast-1 are used",
        ),
        ("aws-lambda", ""),
        ("aws-lambda://funcpipe", ""),
        ("local", ""),
    ],
)
def test_what_is_another_region_s_is_said(name: str, note: str) -> None:
    spec = load_spec(name)
    assert spec.prices_note() == note
    assert from_text(PlatformSpec, to_text(spec), source="spec").prices_note() == note


def test_prices_of_further_stores_are_another_region_s_for_who_uses_them() -> None:
    spec = load_spec("aws-lambda?region=eu-west-1")
    assert spec.prices_note(Stores(sums="express")) == (
        "not all prices of eu-west-1 are known; those of us-east-1 are used for stores"
    )


@pytest.mark.parametrize("name", ["aws-lambda-x?region=eu-west-1", "local?region=eu-west-1", "nothing"])
def test_a_name_that_has_no_regions_is_refused(name: str) -> None:
    with pytest.raises(InvalidValue, match=r"platform must be one of .*, with \?region=REGION if wanted, or a specif"):
        load_spec(name)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.platforms[0])
def test_every_row_has_a_source_with_a_date_and_holds_the_region_of_the_specification(table: RegionTable) -> None:
    for text in table.sources.values():
        assert re.search(r"\b20\d\d-\d\d\b", text), text
    assert {name for row in table.regions for name in row.sources.values()} == table.sources.keys()
    for row in table.regions:
        assert row.sources
        assert all(0 < price < 1e-4 for price in row.price_gb_s_usd.values())
    for name in table.platforms:
        spec = load_spec(name)
        row = table.of(spec.region)
        if row.price_gb_s_usd:
            prices = [size.price_usd_s / size.memory_mb * 1024 for size in spec.sizes]
            assert prices == pytest.approx([row.price_gb_s_usd[name]] * len(prices))
        for field in ("price_invocation_usd", "price_put_usd", "price_get_usd", "price_traffic_usd_gb"):
            assert getattr(row, field) in (None, getattr(spec, field))
        assert row.shared_bytes_s == spec.shared_bytes_s


def test_a_row_without_a_source_is_refused() -> None:
    with pytest.raises(InvalidValue, match="sources of mars-1 must have an entry for each value"):
        RegionPrices(region="mars-1", price_put_usd=1.0)
    row = RegionPrices(region="mars-1", shared_bytes_s=1.0, sources={"shared_bytes_s": "hearsay"})
    with pytest.raises(InvalidValue, match="sources of mars-1 must be among the sources of the table, got 'hearsay'"):
        RegionTable(platforms=("x",), regions=(row,), sources={})


_VALUES = ("price_invocation_usd", "price_put_usd", "price_get_usd", "price_traffic_usd_gb", "shared_bytes_s")


@given(
    known=st.dictionaries(st.sampled_from(_VALUES), st.floats(1e-9, 1e9)),
    gb_s=st.none() | st.floats(1e-9, 1e-3),
    platform=st.sampled_from(["aws-lambda", "aws-lambda-arm", "aliyun-fc"]),
)
def test_each_value_is_the_region_s_or_is_said_to_be_another_s(
    known: dict[str, float], gb_s: float | None, platform: str
) -> None:
    spec = load_spec(platform)
    prices = {} if gb_s is None else {platform: gb_s}
    names = [*known, *(["price_gb_s_usd"] if prices else [])]
    row = RegionPrices(region="mars-1", price_gb_s_usd=prices, sources=dict.fromkeys(names, "x"), **known)
    there = in_region(spec, "mars-1", RegionTable(platforms=(platform,), regions=(row,), sources={"x": "2026-11"}))
    requests = known.keys() >= {"price_put_usd", "price_get_usd"}
    for field in _VALUES:
        in_use = field in known and (requests or field not in ("price_put_usd", "price_get_usd"))
        assert getattr(there, field) == (known[field] if in_use else getattr(spec, field))
    per_gb = [size.price_usd_s / size.memory_mb * 1024 for size in there.sizes]
    assert per_gb == pytest.approx([gb_s] * len(per_gb)) if gb_s else there.sizes == spec.sizes
    groups = {"functions": gb_s is not None, "requests": requests}
    groups |= {"invocations": "price_invocation_usd" in known, "traffic": "price_traffic_usd_gb" in known}
    assert there.borrowed.keys() & {*PRICED} == {group for group, is_known in groups.items() if not is_known}
    assert ("bandwidth" in there.borrowed) == (spec.shared_bytes_s is not None and "shared_bytes_s" not in known)
    assert there.borrowed.keys() >= {STORES}
    assert in_region(there, "mars-1") is there
    onwards = in_region(there, "mars-2")
    assert onwards.borrowed == {group: there.borrowed.get(group, "mars-1") for group in onwards.borrowed}, (
        "what mars-1 had borrowed is not its own"
    )


def test_a_plan_keeps_its_region_and_says_which_prices_are_not_its_own() -> None:
    profile = read(ModelProfile, "experiments/profiles/resnet101.json")
    training = TrainingSpec(global_batch=64)
    here, there = (optimize(profile, load_spec(f"aws-lambda{at}"), training) for at in ("", "?region=il-central-1"))
    assert (here.region, here.prices_note) == ("us-east-1", "")
    assert there.region == "il-central-1"
    assert there.prices_note.startswith("not all prices of il-central-1 are known; those of us-east-1 are used for")
    kept = from_text(Plan, to_text(there), source="plan")
    assert planned_spec(kept) == load_spec("aws-lambda?region=il-central-1")
    assert planned_spec(replace(kept, region="")) == load_spec("aws-lambda"), "plans of old have no region"
