"""One suite for every platform."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from funcpipe.client.prepare.session import open_local
from funcpipe.platforms.base import Platform, Storage
from funcpipe.platforms.catalog import open_storage
from funcpipe.testing.platform_contract import PlatformContract


@pytest.fixture(scope="module")
def platform() -> Iterator[Platform]:
    with open_local(silent=True) as platform:
        yield platform


@pytest.fixture
def storage_url(tmp_path: Path) -> str:
    return (tmp_path / "objects").as_uri()


@pytest.fixture
def storage(storage_url: str) -> Storage:
    return open_storage(storage_url)


class TestLocalFunctions(PlatformContract):
    """By the fixtures above."""
