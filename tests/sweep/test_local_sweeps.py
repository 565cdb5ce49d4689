"""Sweeps over functions of this machine: one whose client is killed, and Optuna's own loop around `train`."""

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from torch.nn import functional as F

from funcpipe.api import FuncPipe
from funcpipe.client.follow.results import RunResult
from funcpipe.core import Validation
from funcpipe.platforms.local.files import FileStorage
from funcpipe.sweep.study import SweepStatus
from tests.sweep.killed_sweep import EPOCHS, TRIALS
from tests.sweep.small_sweeps import BATCH, HELD_OUT, STEADY, TRAINED_ON, network, plan, sweep, trained, validated

ROOT = Path(__file__).parents[2]


def test_a_killed_client_loses_nothing(tmp_path: Path) -> None:
    url, seen = tmp_path.as_uri(), list[SweepStatus]()
    command = [sys.executable, "-m", "tests.sweep.killed_sweep", url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as client:
        assert client.stdout is not None
        while client.stdout.readline() != "1\n":
            assert client.poll() is None
        client.kill()
    result = sweep(epochs=EPOCHS).run(
        TRIALS, resume="digits", storage=url, take_over=True, max_functions=2, faults=STEADY, show=seen.append
    )
    assert result.status.counts == {"finished": TRIALS}
    before = seen[0].trials[0]
    assert before.state == "finished", "it was not trained again"
    assert before == result.status.trials[0]
    reference = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=3))
    for trial in result.status.trials:
        drawn = reference.ask()
        values = drawn.suggest_float("lr", 1e-3, 1.0, log=True), drawn.suggest_float("momentum", 0.0, 0.9)
        assert tuple(trial.settings.values()) == values
        assert trial.value == pytest.approx(min(trained(*values, epochs=EPOCHS)), rel=1e-4)
    assert validated(result.model) == pytest.approx(result.best.value, rel=1e-4)
    left = {key.partition("/")[0] for key in FileStorage(tmp_path).list("")}
    assert left == {"digits", result.best.run}


@pytest.mark.parametrize(("verb", "count"), [pytest.param("train", 4, marks=pytest.mark.long), ("fit", 2)])
def test_optunas_own_loop_trains_from_several_threads(verb: str, count: int) -> None:
    models = {number: network() for number in range(count)}
    planned: dict[str, Any] = {"plan": plan()} if verb == "train" else {"global_batch": BATCH, "micro_batch": BATCH}
    validation = Validation(data=HELD_OUT, keep_best=False)

    def objective(trial: optuna.Trial) -> float:
        rate = trial.suggest_float("lr", 0.01, 0.5, log=True)
        optimizer = partial(torch.optim.SGD, lr=rate, momentum=0.5)
        pipe = FuncPipe(models[trial.number], loss_fn=F.cross_entropy, optimizer=optimizer)
        settings = {**planned, "epochs": 2, "shuffle": False, "validation": validation, "progress": False}
        result: RunResult = getattr(pipe, verb)(TRAINED_ON, **settings)
        return result.validations[-1].values["val_loss"]

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=2))
    study.optimize(objective, n_trials=count, n_jobs=2)
    for trial in study.trials:
        assert trial.value == pytest.approx(trained(trial.params["lr"], 0.5)[-1], rel=1e-5)
        assert validated(models[trial.number]) == pytest.approx(trial.value, rel=1e-5)
