"""Sweeps whose functions are threads: what they find, share, stop, spend and leave."""

from typing import Any

import optuna
import pytest
import torch

from funcpipe.client.prepare import prepared_run
from funcpipe.core import RunLimits
from funcpipe.errors import InvalidValue, RunInterrupted, RunUnknown
from funcpipe.sweep import candidates
from funcpipe.sweep.candidates import Candidate
from funcpipe.sweep.study import SweepStatus
from tests.sweep.small_sweeps import (
    HELD_OUT,
    STEADY,
    STEPS,
    Threads,
    network,
    pipe_of,
    points,
    sweep,
    threads,
    trained,
    validated,
)

__all__ = ["threads"]

SETTINGS: dict[str, Any] = {"faults": STEADY, "storage": "memory://"}


def alone(count: int, seed: int = 3) -> optuna.Study:
    """The study of Optuna alone, whose objective is training in one process."""

    def objective(trial: optuna.Trial) -> float:
        rate, momentum = trial.suggest_float("lr", 1e-3, 1.0, log=True), trial.suggest_float("momentum", 0.0, 0.9)
        return min(trained(rate, momentum))

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    study.optimize(objective, n_trials=count)
    return study


def test_a_sweep_finds_what_optuna_alone_finds(threads: Threads) -> None:
    result, reference = sweep().run(4, max_functions=2, **SETTINGS), alone(4)
    assert [trial.settings for trial in result.status.trials] == [trial.params for trial in reference.trials]
    found = [trial.value for trial in result.status.trials]
    assert found == pytest.approx([trial.value for trial in reference.trials], rel=1e-5)
    assert result.best.number == reference.best_trial.number == result.study.best_trial.number
    assert validated(result.model) == pytest.approx(result.best.value, rel=1e-5)
    assert result.is_complete
    assert threads.of_runs() == {result.status.run, result.best.run}, "models of other trials, and code, are deleted"


def test_trials_that_differ_in_numbers_share_trace_plan_and_code(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared, bundles = list[int](), set[str]()
    original = prepared_run.prepare_training

    def counted(*args: Any, **settings: Any) -> Any:
        prepared.append(args[0].model[0].out_features)
        return original(*args, **settings)

    def made(trial: optuna.Trial) -> Candidate:
        torch.manual_seed(trial.number)  # parameters of its own
        width = (16, 16, 24, 16)[trial.number]
        model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.ReLU(), torch.nn.Linear(width, 4))
        return Candidate(pipe=pipe_of(model, trial.suggest_float("lr", 0.01, 0.1), 0.5), seed=trial.number)

    monkeypatch.setattr(candidates, "prepare_training", counted)
    result = sweep(made).run(4, max_functions=1, show=lambda _: bundles.update(threads.bundles()), **SETTINGS)
    assert prepared == [16, 24]
    assert len(bundles) == 2
    assert result.status.counts == {"finished": 4}
    assert len({trial.value for trial in result.status.trials}) == 4


@pytest.mark.parametrize("stages", [1, 2])
def test_a_shared_stage_has_the_parameters_and_the_optimiser_of_its_trial(threads: Threads, stages: int) -> None:
    rates = [0.5, 0.01, 0.1]
    trials = sweep(lambda rate: pipe_of(network(), rate, 0.9), stages=stages, items=rates)
    result = trials.run(max_functions=2, **SETTINGS)
    found = [trial.value for trial in result.status.trials]
    assert found == pytest.approx([min(trained(rate, 0.9)) for rate in rates], rel=1e-5)


class Prunes(optuna.pruners.BasePruner):
    """Prunes trials of these numbers at their first validation."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = numbers

    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        return trial.number in self._numbers


def test_pruning_ends_functions_that_compute(threads: Threads) -> None:
    threads.held["digits-t0001"] = STEPS + 1
    result = sweep(pruner=Prunes(1), epochs=3).run(3, run="digits", max_functions=2, **SETTINGS)
    assert [trial.state for trial in result.status.trials] == ["finished", "pruned", "finished"]
    pruned = result.status.trials[1]
    assert pruned.step == STEPS, "its function stood still before the step after the next, and was ended there"
    assert pruned.saved_usd == pytest.approx(2.0 * pruned.usd), "two of three epochs"
    assert not list(threads.storage.list("digits-t0001"))
    assert "pruning saved $" in result.status.line()


def test_a_sweep_spends_no_more_than_its_limit(threads: Threads) -> None:
    result = sweep().run(6, max_functions=2, limits=RunLimits(max_usd=3.5), **SETTINGS)
    assert result.status.counts == {"finished": 3}
    assert result.status.usd == pytest.approx(3.0)
    assert not result.is_complete
    again = sweep().run(6, resume=result.status.run, limits=RunLimits(max_usd=6.5), **SETTINGS)
    assert again.status.counts == {"finished": 6}
    assert again.status.usd == pytest.approx(6.0)
    assert [trial.settings for trial in again.status.trials] == [trial.params for trial in alone(6).trials]


def test_an_interrupted_sweep_goes_on_and_trains_no_trial_twice(threads: Threads) -> None:
    threads.held["digits-t0002"] = STEPS

    def interrupt(status: SweepStatus) -> None:
        if [trial.step for trial in status.trials[2:]] == [STEPS]:
            raise KeyboardInterrupt

    with pytest.raises(RunInterrupted, match="digits") as raised:
        sweep().run(4, run="digits", max_functions=1, show=interrupt, **SETTINGS)
    assert "funcpipe sweep ... --resume digits --storage memory://" in raised.value.__notes__[0]
    assert threads.started == ["digits-t0000", "digits-t0001", "digits-t0002"]
    threads.held.clear()
    result = sweep().run(4, resume="digits", max_functions=1, **SETTINGS)
    assert threads.started[3:] == ["digits-t0002", "digits-t0003"]
    assert result.status.counts == {"finished": 4}
    reference = alone(4)
    assert [trial.settings for trial in result.status.trials] == [trial.params for trial in reference.trials]
    found = [trial.value for trial in result.status.trials]
    assert found == pytest.approx([trial.value for trial in reference.trials], rel=1e-5)


def test_a_sweep_over_a_list_leaves_a_model_for_each_item(threads: Threads) -> None:
    customers = {"north": points(11), "south": points(12)}
    result = sweep(
        lambda name: Candidate(pipe=pipe_of(network(), 0.1, 0.9), data=customers[name]), items=list(customers)
    ).run(max_functions=2, **SETTINGS)
    for number, data in enumerate(customers.values()):
        assert validated(result.models[number]) == pytest.approx(min(trained(0.1, 0.9, data=data)), rel=1e-5)


def test_a_trial_that_fails_does_not_end_the_sweep(threads: Threads) -> None:
    rates = [0.1, -1.0, 1e30, 0.2]
    trials = sweep(lambda trial: pipe_of(network(), rates[trial.number], 0.0))
    result = trials.run(4, max_functions=1, **SETTINGS)
    assert [trial.state for trial in result.status.trials] == ["finished", "failed", "failed", "finished"]
    assert "learning rate" in result.status.trials[1].error
    assert "the loss is nan" in result.status.trials[2].error


def test_what_no_trial_can_be_made_of_is_refused_before_anything_starts(threads: Threads) -> None:
    with pytest.raises(InvalidValue, match="FuncPipe, or a Candidate"):
        sweep(lambda trial: network()).run(2, **SETTINGS)
    with pytest.raises(InvalidValue, match="metric must be one of val_loss"):
        sweep(metric="accuracy").run(2, **SETTINGS)
    with pytest.raises(ZeroDivisionError):
        sweep(lambda trial: 1 / 0).run(2, **SETTINGS)
    with pytest.raises(RunUnknown, match="no sweep"):
        sweep().run(2, resume="missing", **SETTINGS)
    with pytest.raises(InvalidValue, match="provisioned must be left out of a sweep"):
        sweep().run(2, provisioned=True, **SETTINGS)
    assert not threads.started
    assert not threads.storage.list("")


def test_a_metric_is_maximised(threads: Threads) -> None:
    from funcpipe.core import Validation

    def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output.argmax(1) == target).float().mean()

    validation = Validation(data=HELD_OUT, metrics={"accuracy": accuracy})
    result = sweep(validation=validation, metric="accuracy", direction="maximize", epochs=3).run(
        3, max_functions=2, **SETTINGS
    )
    best = max(result.status.trials, key=lambda trial: trial.value or 0.0)
    assert result.best.value == best.value
    inputs, targets = HELD_OUT.tensors
    with torch.no_grad():
        assert accuracy(result.model.eval()(inputs), targets).item() == pytest.approx(best.value)


def test_a_trial_that_goes_on_keeps_the_plan_that_it_began_with(threads: Threads) -> None:
    threads.held["digits-t0000"] = STEPS

    def interrupt(status: SweepStatus) -> None:
        if status.trials and status.trials[0].step == STEPS:
            raise KeyboardInterrupt

    with pytest.raises(RunInterrupted):
        sweep(stages=2).run(2, run="digits", max_functions=2, show=interrupt, **SETTINGS)
    threads.held.clear()
    result = sweep(stages=1).run(2, resume="digits", max_functions=2, **SETTINGS)
    assert threads.started.count("digits-t0000") == 4, "two stages, twice"
    found = [trial.value for trial in result.status.trials]
    assert found == pytest.approx([trial.value for trial in alone(2).trials], rel=1e-5)


def test_the_same_sweep_draws_the_same_trials_again(threads: Threads) -> None:
    again = sweep()
    first, second = (again.run(2, max_functions=2, **SETTINGS).status for _ in range(2))
    assert [trial.settings for trial in first.trials] == [trial.settings for trial in second.trials]


def test_runs_of_others_stay_whatever_they_are_called(threads: Threads) -> None:
    others = ["digits-two/g0000-0123456789abcdef/run.json", "digits-two/generations/0000-0123456789abcdef"]
    others += ["digits-code-a/g0000/run.json", "digits-t0000.png", "digits-t1/g0000-0123456789abcdef/run.json"]
    for key in others:
        threads.storage.put(key, b"{}")
    result = sweep().run(2, run="digits", max_functions=2, **SETTINGS)
    assert result.status.counts == {"finished": 2}
    sweep().run(3, resume="digits", max_functions=2, **SETTINGS)
    assert set(others) <= set(threads.storage.list("digits"))
    threads.storage.put("other-t0001/g0000-0123456789abcdef/run.json", b"{}")
    with pytest.raises(InvalidValue, match="run names its trials other-t0000 and so on, but other-t0001/"):
        sweep().run(2, run="other", **SETTINGS)
