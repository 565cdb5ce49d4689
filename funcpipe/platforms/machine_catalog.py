"""The markets of machines that funcpipe knows by name, and markets read from files."""

import os
from importlib import resources

from funcpipe.core import from_text, read
from funcpipe.core.market import Market
from funcpipe.errors import InvalidValue


def market_names() -> tuple[str, ...]:
    """Return the markets that ship with funcpipe; those with a year reproduce a paper."""
    files = resources.files("funcpipe.platforms").joinpath("specs", "machines").iterdir()
    return tuple(sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json")))


def load_market(name: str) -> Market:
    """Return the market called `name`, or the one in the file of that path."""
    if name not in market_names():
        if os.path.exists(name):
            return read(Market, name)
        raise InvalidValue("market", name, f"must be one of {', '.join(market_names())}, or a market's file")
    folder = resources.files("funcpipe.platforms").joinpath("specs", "machines")
    return from_text(Market, folder.joinpath(f"{name}.json").read_text(encoding="utf-8"), source=f"{name}.json")
