"""Markets: those that ship with the package, what is refused, and what they say of their sources."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from funcpipe.core import from_text, to_text, write
from funcpipe.core.accelerator import Work
from funcpipe.core.choices import Precision
from funcpipe.core.market import Machine, Market
from funcpipe.errors import InvalidValue
from funcpipe.platforms.catalog import load_market, market_names


def test_the_markets_are_these() -> None:
    assert market_names() == ("aliyun", "aws", "lambdadnn-2021", "spotdnn-2023")


@pytest.mark.parametrize("name", market_names())
def test_every_value_of_a_market_has_a_source(name: str) -> None:
    market = load_market(name)
    assert from_text(Market, to_text(market), source=name) == market
    given = {
        item.name
        for machine in market.machines
        for item in fields(Machine)
        if item.name not in ("name", "gpu", "gpus") and getattr(machine, item.name) != item.default
    }
    assert given <= market.sources.keys() | {"quota"}
    assert not market.gpus or "vcpu_equivalents" in market.sources


@pytest.mark.parametrize("name", market_names())
def test_spot_is_cheaper_and_has_a_chance_of_interruption(name: str) -> None:
    for machine in load_market(name).machines:
        if machine.spot_usd_h is not None:
            assert machine.spot_usd_h < machine.on_demand_usd_h
            assert machine.interruption is not None


def test_rates_of_machines_with_and_without_gpus() -> None:
    market = load_market("aws")
    assert market.compute_vcpu(market.machine("c7i.8xlarge")) == 32
    assert market.compute_vcpu(market.machine("g4dn.12xlarge")) == 4 * 43
    assert market.model_memory_mb(market.machine("g4dn.12xlarge")) == 16384
    assert any(text.startswith("vcpu_equivalents: an assumption") for text in market.assumptions)


@pytest.mark.parametrize("name", ["aliyun", "aws"])
def test_gpus_are_as_fast_as_their_published_rates_allow(name: str) -> None:
    """ResNet-50's operations for a picture, counted once; 3.4 pictures a second are a vCPU's, as `sources` says."""
    picture = Work(flop=24_299_000_000, dense_bytes=221_077_000, other_bytes=563_843_000)
    measured = {"V100": 367 / 3.4, "A100": 938 / 3.4}
    for gpu in load_market(name).gpus:
        picture_s = gpu.seconds(picture, Precision.FP32)
        assert picture_s is not None
        said = measured.get(gpu.name, 1 / picture_s / 3.4)
        assert gpu.vcpu_equivalents == pytest.approx(said, abs=0.51)
        assert 1 / picture_s / 3.4 == pytest.approx(said, rel=0.1)


def test_an_l4_is_faster_than_a_t4() -> None:
    speeds = {gpu.name: gpu.vcpu_equivalents for gpu in load_market("aws").gpus}
    assert speeds["L4"] > 1.2 * speeds["T4"]


def test_a_market_of_ones_own(tmp_path: Path) -> None:
    own = replace(load_market("aws"), name="own")
    write(own, tmp_path / "own.json")
    assert load_market(str(tmp_path / "own.json")) == own


def test_what_is_wrong_is_told() -> None:
    market = load_market("aws")
    with pytest.raises(InvalidValue, match=r"market must be one of aliyun, aws, .*, got 'gcp'"):
        load_market("gcp")
    with pytest.raises(InvalidValue, match=r"machine must be one of m5\.large"):
        market.machine("x")
    with pytest.raises(InvalidValue, match="must be one of T4, A10G"):
        replace(market, machines=(*market.machines, replace(market.machine("g4dn.xlarge"), name="new", gpu="H1")))
    with pytest.raises(InvalidValue, match="gpus must be above 0 if, and only if"):
        replace(market.machine("g4dn.xlarge"), gpus=0)
    with pytest.raises(InvalidValue, match="must name fields of a market"):
        replace(market, sources={"colour": "blue"})
