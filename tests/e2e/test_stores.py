"""A run whose plan has a store for messages, one for sums and one for checkpoints, in real functions."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from funcpipe.cli import main
from funcpipe.core import Stores, write
from funcpipe.platforms.catalog import load_spec, open_storage
from tests.e2e import small
from tests.redis_servers import redis_server


def test_a_run_in_several_stores_learns_as_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stores = Stores(messages="valkey", sums="express", checkpoints="express")
    write(small.plan(), tmp_path / "plan.json")
    write(replace(small.plan(), stores=stores), tmp_path / "mixed.json")
    write(replace(load_spec("local"), stores=load_spec("aws-lambda").stores), tmp_path / "spec.json")
    job = ["tests.e2e.small:model", "--data", "tests.e2e.small:data", "--epochs", "1", "--json", "--run", "kept"]
    job += ["--set", f"platform.spec={tmp_path / 'spec.json'}"]
    one = (tmp_path / "one").as_uri()
    default, express = (tmp_path / "default").as_uri(), (tmp_path / "express").as_uri()
    with redis_server(tmp_path, "--save", "") as port:
        several = f"default={default},messages=redis://127.0.0.1:{port}/1,sums={express},checkpoints={express}"
        losses = []
        for plan, url in (("plan.json", one), ("mixed.json", several)):
            assert main(["train", *job, "--plan", str(tmp_path / plan), "--storage", url]) == 0
            told = json.loads(capsys.readouterr().out)
            losses.append(told["losses"])
            assert main(["status", "kept", "--storage", url, "--json"]) == 0
            assert json.loads(capsys.readouterr().out)["verdict"] == "finished"
        assert losses[0] == losses[1]
        billed = {item["kind"]: item["store"] for item in told["bill"]["stores"]}
        assert billed == {"default": "default", "messages": "valkey", "sums": "express", "checkpoints": "express"}
        assert told["bill"]["hours_usd"] > 0
        kept = {key.split("/")[2] for key in open_storage(express).list("kept/")}
        assert kept <= {"checkpoints"}
        assert (tmp_path / "express").exists()
        assert main(["clean", "kept", "--storage", several]) == 0
        assert all(open_storage(url).list("") == () for url in (default, express, f"redis://127.0.0.1:{port}/1"))


def test_a_plan_with_several_stores_needs_a_url_for_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(replace(small.plan(), stores=Stores(messages="valkey", sums="express")), tmp_path / "plan.json")
    job = ["tests.e2e.small:model", "--data", "tests.e2e.small:data", "--plan", str(tmp_path / "plan.json")]
    run = ["train", *job, "--epochs", "1", "--storage"]
    assert main([*run, (tmp_path / "objects").as_uri()]) == 2
    error = capsys.readouterr().err
    assert "the plan has its messages in valkey, sums in express: give the URL of each store" in " ".join(error.split())
    assert main([*run, f"default={tmp_path.as_uri()}/a,messages={tmp_path.as_uri()}/a,sums={tmp_path.as_uri()}/b"]) == 2
    assert "in different stores, but their URLs are the same" in " ".join(capsys.readouterr().err.split())
