"""The regions whose prices and limits ship with funcpipe."""

import functools
from importlib import resources

from funcpipe.core import from_text
from funcpipe.core.platform import PlatformSpec, RegionTable, in_region


@functools.cache
def region_tables() -> dict[str, RegionTable]:
    """Return the table of each platform that has one, by the name of its specification."""
    folder = resources.files("funcpipe.platforms").joinpath("specs", "regions")
    files = sorted(file.name for file in folder.iterdir() if file.name.endswith(".json"))
    texts = {name: folder.joinpath(name).read_text(encoding="utf-8") for name in files}
    tables = [from_text(RegionTable, text, source=name) for name, text in texts.items()]
    return {platform: table for table in tables for platform in table.platforms}


def priced_in(spec: PlatformSpec, region: str | None) -> PlatformSpec:
    """Return `spec` with the prices and limits of `region`, as far as they are known; unchanged without a region."""
    return spec if not region else in_region(spec, region, region_tables().get(spec.name))
