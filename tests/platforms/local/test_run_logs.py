from pathlib import Path

import pytest

from funcpipe.client.prepare.session import open_local
from funcpipe.platforms.catalog import open_storage
from tests.e2e import small
from tests.platforms.kept_logs import assert_logs_are_kept


def test_logs_of_runs_are_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUNCPIPE_LOG_DIR", str(tmp_path / "logs"))
    url = (tmp_path / "objects").as_uri()
    with open_local(silent=True) as platform:
        assert_logs_are_kept(platform, open_storage(url), url, plan=small.plan(1, 1), wait=lambda: None)
