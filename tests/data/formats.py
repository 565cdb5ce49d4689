"""The formats, for tests that need each: skipped where their libraries are not installed."""

import pytest

from funcpipe.core.distribution import install_command

FORMATS = ("mds", "litdata", "parquet", "webdataset")

_PACKAGES = {"mds": (), "litdata": ("litdata",), "parquet": ("datasets", "pyarrow"), "webdataset": ("wids",)}


def require(name: str) -> None:
    """Skip the test if the libraries of the format are not installed."""
    for package in _PACKAGES[name]:
        pytest.importorskip(package, reason=f"{package} is not installed: {install_command(name)}")
