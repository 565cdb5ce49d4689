"""Markets: those that ship with the package, what is refused, and what they say of their sources."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from funcpipe.core import from_text, to_text, write
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
    assert market.compute_vcpu(market.machine("g4dn.12xlarge")) == 4 * 37
    assert market.model_memory_mb(market.machine("g4dn.12xlarge")) == 16384
    assert any(text.startswith("vcpu_equivalents: an assumption") for text in market.assumptions)


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
