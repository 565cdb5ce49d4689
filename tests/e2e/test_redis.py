"""A run whose objects lie in a real Redis server, from its first message to its deletion."""

import json
from pathlib import Path

import pytest

from funcpipe.cli import main
from funcpipe.core import write
from funcpipe.platforms.catalog import open_storage
from tests.e2e import small
from tests.redis_servers import redis_server


def test_a_run_trains_is_shown_and_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a password, which functions find in their environment."""
    monkeypatch.setenv("REDIS_PASSWORD", "pw")
    write(small.plan(), tmp_path / "plan.json")
    job = ["tests.e2e.small:model", "--data", "tests.e2e.small:data", "--plan", str(tmp_path / "plan.json")]
    losses = {}
    with redis_server(tmp_path, "--requirepass", "pw") as port:
        for url in (f"redis://127.0.0.1:{port}/1?prefix=runs", (tmp_path / "objects").as_uri()):
            run = ["kept", "--storage", url]
            assert main(["train", *job, "--epochs", "1", "--run", *run, "--json"]) == 0
            losses[url] = json.loads(capsys.readouterr().out)["losses"]
            assert main(["status", *run, "--json"]) == 0
            assert json.loads(capsys.readouterr().out)["verdict"] == "finished"
            assert main(["clean", *run]) == 0
            assert "run kept: " in capsys.readouterr().out
            assert open_storage(url).list("") == ()
    of_redis, of_files = losses.values()
    assert of_redis == of_files
    assert of_files
