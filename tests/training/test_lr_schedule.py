"""Schedules: every stage has the learning rate that torch's own loop has, whatever the scheduler and the groups are."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

from funcpipe.core import Interval
from funcpipe.errors import DataError, InputError, PlanError
from funcpipe.model.graph import LayerGraph, trace
from funcpipe.training.averaging import EMA, SWA
from funcpipe.training.batches import Step
from funcpipe.training.computation import Computation
from funcpipe.training.norms import GradientNorm
from funcpipe.training.optimizers import trainable_shapes
from funcpipe.training.plain import PlainTraining, train_in_one_process
from funcpipe.training.recipe import Recipe
from funcpipe.training.recipe_trial import check_recipe
from funcpipe.training.stage_optimizer import StageOptimizer
from funcpipe.training.state import merge_stages, select_for_stage
from tests.support.in_turn import InTurn, even_bounds
from tests.training.learning import (
    SCHEDULERS,
    all_steps,
    averaged_by_ema,
    by_name,
    data,
    difference,
    network,
    train_plainly,
)


@functools.cache
def traced() -> tuple[nn.Module, LayerGraph]:
    model = network()
    return model, trace(model, (torch.zeros(2, 6, dtype=torch.float64),))


def plain(recipe: Recipe) -> PlainTraining:
    model, graph = traced()
    return PlainTraining(model=model, graph=graph, dataset=data(), steps=all_steps(), recipe=recipe, seed=0)


def recipe(**fields: Any) -> Recipe:
    return Recipe(**{"loss": nn.functional.cross_entropy, "optimizer": by_name, **fields})


@pytest.mark.parametrize(
    ("name", "interval"), [*((name, Interval.STEP) for name in SCHEDULERS), ("sequence", Interval.EPOCH)]
)
def test_stages_and_replicas_learn_at_the_rates_of_torch_s_own_loop(name: str, interval: Interval) -> None:
    training = plain(recipe(scheduler=SCHEDULERS[name], scheduler_interval=interval))
    by_step = interval is Interval.STEP
    plainly = train_plainly(all_steps(), SCHEDULERS[name], by_step=by_step)
    assert len(set(plainly.rates)) > 1
    expected = plainly.model.state_dict()
    found = InTurn(training, even_bounds(training.graph, 3), replicas=2).train()
    assert difference(found, expected) < 1e-12
    alone = train_in_one_process(
        training.model, training.graph, training.dataset, training.steps, recipe=training.recipe, seed=0
    )
    assert difference(alone.state_dict(), expected) == 0


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_model_that_is_cut_otherwise_in_the_middle_goes_on_with_the_schedule(replicas: int) -> None:
    training = plain(
        recipe(scheduler=SCHEDULERS["one cycle"], scheduler_interval=Interval.STEP, average=EMA(decay=0.5))
    )
    expected = train_plainly(
        all_steps(),
        SCHEDULERS["one cycle"],
        average=averaged_by_ema(0.5),
    )
    first = InTurn(replace(training, steps=all_steps()[:4]), even_bounds(training.graph, 2), replicas=1)
    first.train()
    whole = merge_stages([row[0].state() for row in first.workers])
    second = InTurn(replace(training, steps=all_steps()[4:]), even_bounds(training.graph, 4), replicas=replicas)
    for row, modules in zip(second.workers, second.modules, strict=True):
        for worker, module in zip(row, modules, strict=True):
            worker.restore(select_for_stage(whole, module))
    assert difference(second.train(), expected.model.state_dict()) < 1e-12
    merged = merge_stages([row[0].state() for row in second.workers])
    assert expected.averaged is not None
    assert difference(merged.averaged_state_dict(), expected.averaged.module.state_dict()) < 1e-12


def test_a_step_that_is_skipped_counts_in_the_schedule() -> None:
    training = plain(recipe(scheduler=SCHEDULERS["milestones"], scheduler_interval=Interval.STEP))
    stage = InTurn(training, even_bounds(training.graph, 1), replicas=1).modules[0][0]
    optimizer = StageOptimizer(stage, training.recipe, trainable_shapes(training.model), seed=0)
    before = {name: tensor.clone() for name, tensor in stage.state_dict().items()}
    optimizer.step(all_steps()[0], gradient_factor=None)
    state = optimizer.state(GradientNorm())
    assert [group["settings"]["dict"]["lr"] for group in state.settings["optimizer"]["groups"]] == pytest.approx(
        [0.0002, 0.001, 0.001]
    )
    assert difference(state.state_dict(), before) == 0


def test_a_saved_schedule_that_is_too_short_for_more_epochs_is_refused() -> None:
    def cycle(optimizer: Optimizer, total_steps: int) -> OneCycleLR:
        return OneCycleLR(optimizer, 0.01, total_steps=total_steps)

    short, long = (
        recipe(scheduler=functools.partial(cycle, total_steps=n), scheduler_interval=Interval.STEP) for n in (9, 12)
    )
    training = plain(short)
    run = InTurn(training, even_bounds(training.graph, 2), replicas=1)
    run.train()
    saved = merge_stages([row[0].state() for row in run.workers])
    shapes = trainable_shapes(training.model)
    with pytest.raises(
        InputError, match=r"fails at its step 1 of the 3 .* goes on with the schedule that it has saved"
    ):
        check_recipe(long, shapes, steps=3, epochs=1, resumed=saved)
    check_recipe(long, shapes, steps=12, epochs=4)


METRICS = {2: 1.0, 5: 1.1, 8: 1.2}


def plateau(optimizer: Optimizer) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


class Validated(InTurn):
    """Tells every stage the results of a validation after some steps."""

    def synchronise(self, step: Step) -> None:
        super().synchronise(step)
        self.finished = step.number

    def update(self, step: Step, stage: int, replica: int) -> None:
        super().update(step, stage, replica)
        if step.number in METRICS:
            self.workers[stage][replica].after_validation({"val_loss": METRICS[step.number], "accuracy": 0.5})


def test_a_plateau_is_seen_by_all_stages() -> None:
    training = plain(recipe(scheduler=plateau))
    expected = train_plainly(all_steps(), plateau, metrics=METRICS)
    assert len(set(expected.rates)) == 2
    found = Validated(training, even_bounds(training.graph, 3), replicas=2).train()
    assert difference(found, expected.model.state_dict()) < 1e-12


def one_stage(made: Recipe) -> Computation:
    training = plain(made)
    return InTurn(training, even_bounds(training.graph, 1), replicas=1).workers[0][0]


def test_what_a_plateau_monitors_must_be_measured() -> None:
    worker = one_stage(recipe(scheduler=plateau, scheduler_monitor="val_f1"))
    with pytest.raises(
        DataError, match="monitors 'val_f1', which the validation does not have; let scheduler_monitor be"
    ):
        worker.after_validation({"val_loss": 1.0})


def test_another_kind_of_scheduler_does_not_take_over() -> None:
    saved = one_stage(recipe(scheduler=SCHEDULERS["step"])).state()
    with pytest.raises(PlanError, match="was started with a StepLR as its scheduler, not a ReduceLROnPlateau"):
        one_stage(recipe(scheduler=plateau)).restore(saved)


def test_groups_see_the_full_names_wherever_the_model_is_cut() -> None:
    seen: list[list[str]] = []

    def grouped(named_parameters: Any) -> Optimizer:
        named = list(named_parameters)
        seen.append([name for name, _ in named])
        return Adam([{"params": [pair]} for pair in named], lr=0.01)

    training = plain(recipe(optimizer=grouped))
    run = InTurn(training, even_bounds(training.graph, 3), replicas=1)
    found = run.train()
    assert seen == [[name for name, _ in network().named_parameters()]] * 3
    expected = train_plainly(all_steps(), optimizer=lambda named: Adam([p for _, p in named], lr=0.01))
    assert difference(found, expected.model.state_dict()) < 1e-12


@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize(
    ("average", "plainly", "after"),
    [
        (EMA(decay=0.7), averaged_by_ema(0.7), lambda done: True),
        (SWA(start_step=3, every_steps=2), AveragedModel, lambda done: done in (3, 5, 7, 9)),
    ],
    ids=["EMA", "SWA"],
)
def test_averages_have_the_bits_of_torch_s_averaged_model(
    average: EMA | SWA,
    plainly: Callable[[nn.Module], AveragedModel],
    after: Callable[[int], bool],
    use_buffers: bool,
) -> None:
    training = plain(recipe(average=replace(average, use_buffers=use_buffers)))
    expected = train_plainly(all_steps(), average=plainly, averages_after=after)
    run = InTurn(training, even_bounds(training.graph, 3), replicas=1)
    run.train()
    found = merge_stages([row[0].state() for row in run.workers]).averaged_state_dict()
    assert expected.averaged is not None
    assert difference(found, expected.averaged.module.state_dict()) == 0
