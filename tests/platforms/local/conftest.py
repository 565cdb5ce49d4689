"""What tests of local functions share."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import hosts_of


@pytest.fixture
def nothing_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No host runs after a test, and none has left its folder."""
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert hosts_of(os.getpid()) == []
    assert list(folder.iterdir()) == []
