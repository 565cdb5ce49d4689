"""Runs on AWS that outlive their functions, and their client."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from funcpipe.cli import main
from funcpipe.client.control.status import status
from funcpipe.client.follow.launch import launch
from funcpipe.client.prepare.prepared_run import prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import write
from funcpipe.platforms.aws.account import Account
from funcpipe.platforms.aws.functions import AwsPlatform
from funcpipe.platforms.base import Storage
from funcpipe.platforms.catalog import load_spec
from tests.cloud_emulation.aws import AwsCloud
from tests.e2e import small
from tests.platforms.aws.conftest import OFTEN, PLATFORM, STORAGE
from tests.platforms.hand_over import LOOK_S, SHORT, assert_handed_over, long_job
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[3]


@pytest.mark.long
def test_functions_hand_over_where_there_is_room_for_one_successor(
    deployed: Account, storage: Storage, cloud: AwsCloud
) -> None:
    cloud.limits.concurrency = 3
    job = long_job(small.plan(2, 1))
    platform = AwsPlatform(replace(load_spec("aws-lambda"), cold_start_s=1.0), deployed, polling=OFTEN)
    assert_handed_over(launch(prepare(job, session_on(Site(platform, storage, STORAGE)), faults=SHORT)), job)
    assert cloud.limits.throttled > 0


def test_a_run_without_its_client_is_watched_stopped_and_removed(
    storage: Storage, cloud: AwsCloud, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(small.plan(1, 1), tmp_path / "plan.json")
    words = ["train", "tests.e2e.small:model", "--data", "tests.e2e.small:data", "--plan", str(tmp_path / "plan.json")]
    words += ["--loss", "tests.e2e.small:slow_loss", "--epochs", "1000", "--platform", PLATFORM, "--storage", STORAGE]
    client = [sys.executable, "-m", "funcpipe", *words, "--run", "left", "--yes", "--detach"]
    subprocess.run(client, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)

    def said(verb: str) -> dict[str, Any]:
        capsys.readouterr()
        assert main([verb, "left", "--storage", STORAGE, "--json"]) == 0
        return dict(json.loads(capsys.readouterr().out))

    while not [worker for worker in status(storage, "left").workers if worker.step > 2]:
        time.sleep(LOOK_S)
    assert [worker["step"] > 2 for worker in said("status")["workers"]] == [True]
    stopped = said("stop")
    assert stopped["halt"] == "it was stopped"
    assert [worker["outcome"] for worker in stopped["workers"]] == ["halted"]
    wait_until(lambda: not any(environment.busy for environment in cloud.environments))  # all have said their last word
    assert storage.list("left/")
    assert said("clean")["objects"] > 0
