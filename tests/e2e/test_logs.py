"""What happened to a run can be read afterwards, from all its functions and its client, in order."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from funcpipe.api import FuncPipe
from funcpipe.cli import main
from funcpipe.client.follow import launch
from funcpipe.client.follow.callbacks import EachStep
from funcpipe.client.follow.results import Progress
from funcpipe.core import RunSettings
from funcpipe.core.logs import BEGINS
from funcpipe.platforms.local.output import FOLDER
from tests.e2e import small
from tests.support.processes import functions_of


def test_a_killed_worker_s_restart_and_its_cause_are_in_the_log_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "logs"))
    monkeypatch.setenv(small.GATES, str(tmp_path))
    monkeypatch.setattr(launch, "_STARTS_AT_ONCE", 1)  # so that the first process is that of the first worker
    killed: list[int] = []

    def kill_one(progress: Progress) -> None:
        if progress.step == 2 and not killed:
            killed.append(functions_of(os.getpid())[0])
            os.kill(killed[0], signal.SIGKILL)
            small.open_gates(1)

    torch.manual_seed(5)
    pipe = FuncPipe(small.model(), loss_fn=small.gated_loss, optimizer=small.optimizer)
    settings = RunSettings(name="run-1", rehearse=False)  # which would count the calls of a loss
    pipe.train(small.data, plan=small.plan(2, 1), callbacks=[EachStep(kill_one)], settings=settings)
    assert main(["logs", "run-1", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["time_s"] for line in lines] == sorted(line["time_s"] for line in lines)
    story = [
        (line["worker"], line["attempt"], line["text"].partition(": ")[2])
        for line in lines
        if "SIGKILL" in line["text"] or BEGINS in line["text"]
    ]
    assert sorted(story[:2]) == [("s0.r0", 0, BEGINS), ("s1.r0", 0, BEGINS)]
    killed_line, client_line, next_line = story[2:]
    assert (killed_line, next_line) == (("s0.r0", 0, "killed by SIGKILL"), ("s0.r0", 1, BEGINS))
    assert client_line[0] == "client"
    assert "restarts worker s0.r0 as attempt 1" in client_line[2]
    assert main(["logs", "run-1", "--worker", "s0.r0", "--level", "error"]) == 0
    (only,) = capsys.readouterr().out.splitlines()
    assert "ERROR   s0.r0 attempt=0 the function was ended: killed by SIGKILL" in only
