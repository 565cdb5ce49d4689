"""Optimisers that look at all parameters together, and gradients clipped by their value: equal or refused."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import optim

from funcpipe import FuncPipe, Pins
from funcpipe.core import Plan, Routes
from funcpipe.errors import Infeasible, PlanError
from funcpipe.training.optimizer_division import check_sharding, check_stages, reason_for_one_stage
from funcpipe.training.optimizers import ParameterShape, trainable_shapes
from tests.jobs.scripts import EQUAL, Script, run_over_functions, run_script, worst_difference
from tests.jobs.test_scripts import Residual, vectors
from tests.jobs.unusual_optimizers import (
    ClipsAboveMillions,
    ClipsInside,
    Counted,
    CountsGroups,
    DAdaptSGD,
    FirstOfAll,
    LongWarmUp,
    Neighbours,
    Noisy,
    Normalised,
    Own,
    Perturbs,
    Prodigy,
    SharedMoment,
    TrustRatio,
    Watches,
    norm_of,
)
from tests.partitioner.instances import chain, platform

Factory = Callable[..., optim.Optimizer]

MODEL = Residual(blocks=3)
SHAPES = trainable_shapes(MODEL)
NAMES = [shape.name for shape in SHAPES]
LARGE = [replace(shape, shape=tuple(300 * size for size in shape.shape)) for shape in SHAPES]
ENDS = ("blocks.0", "head")
NO_ROUTES = Routes(activations=(), gradients=())


def by_module(kind: Factory) -> Factory:
    """One group for the first block, and one for the others."""

    def made(named_parameters: Any) -> optim.Optimizer:
        named = list(named_parameters)
        first = [p for name, p in named if name.startswith("blocks.0")]
        return kind([{"params": first}, {"params": [p for name, p in named if not name.startswith("blocks.0")]}])

    return made


TOGETHER: dict[str, Factory] = {
    kind.__name__: kind
    for kind in (
        *(Normalised, TrustRatio, LongWarmUp, Watches, Counted, Neighbours, SharedMoment, Prodigy, DAdaptSGD, Perturbs),
    )
}
CLIPS: dict[str, Factory] = {"ClipsInside": partial(ClipsInside, lr=0.5), "ClipsAboveMillions": ClipsAboveMillions}


def halves(shapes: list[ParameterShape] | tuple[ParameterShape, ...] = SHAPES) -> list[list[str]]:
    names = [shape.name for shape in shapes]
    return [names[:4], names[4:]]


@pytest.mark.parametrize("shapes", [SHAPES, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("name", TOGETHER)
def test_what_looks_at_all_parameters_is_refused_in_several_stages(name: str, shapes: Any) -> None:
    with pytest.raises(PlanError, match=f"the optimiser, {name}, does not train in the 2 stages .* depends on the par"):
        check_stages(TOGETHER[name], shapes, halves(), together=ENDS)
    check_stages(TOGETHER[name], shapes, [NAMES], together=ENDS)
    assert "for more stages, choose one that updates each parameter" in (
        reason_for_one_stage(TOGETHER[name], shapes) or ""
    )


@pytest.mark.parametrize("shapes", [SHAPES, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("name", CLIPS)
def test_what_clips_inside_is_refused_in_several_stages_with_the_keyword_that_clips(name: str, shapes: Any) -> None:
    with pytest.raises(PlanError, match=f"{name}.*; let FuncPipe clip, with clip_grad_norm=... ") as refused:
        check_stages(CLIPS[name], shapes, halves(), together=ENDS)
    assert "--set plan.together=blocks.0,head" in str(refused.value)
    with pytest.raises(PlanError, match="divided over replicas"):
        check_sharding(CLIPS[name], shapes, [NAMES], NO_ROUTES)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (by_module(FirstOfAll), r"it fails in stage 1, where some of its groups may be empty \(IndexError"),
        (by_module(CountsGroups), "depends on the parameters beside it"),
        (partial(Noisy, lr=0.1), "it draws random numbers one parameter after the other, and each stage would draw"),
    ],
)
def test_what_is_shared_among_parameters_is_refused(factory: Factory, message: str) -> None:
    stages = [NAMES[:2], NAMES[2:]]
    with pytest.raises(PlanError, match=message):
        check_stages(factory, SHAPES, stages, together=ENDS)
    check_stages(factory, SHAPES, [NAMES], together=ENDS)


def test_a_parameter_of_no_stage_counts_too() -> None:
    class Weighs(Own):
        def factor(self) -> float:
            return norm_of(p.detach() for group in self.param_groups for p in group["params"])

    def used_alone(named_parameters: Any) -> optim.Optimizer:
        return Weighs([p for name, p in named_parameters if name != NAMES[-1]])

    with pytest.raises(PlanError, match=rf"does not use {NAMES[-1]}, which no stage holds: leave that out of the opt"):
        check_stages(Weighs, SHAPES, [NAMES[:-1]], together=ENDS)
    check_stages(used_alone, SHAPES, [NAMES[:-1]], together=ENDS)
    check_stages(optim.AdamW, SHAPES, [NAMES[:-1]], together=ENDS)


def muon_and_adam(named_parameters: Any) -> optim.Optimizer:
    return optim.Muon([p for _, p in named_parameters if p.ndim == 2], lr=0.02)


def layer_wise(named_parameters: Any) -> optim.Optimizer:
    """Rates that depend on the position and on the number of parameters; one parameter left out."""
    named = list(named_parameters)[1:]
    return optim.AdamW([{"params": [p], "lr": 1e-3 * 0.9 ** (len(named) - i)} for i, (_, p) in enumerate(named)])


def from_transformers(parameters: Any) -> optim.Optimizer:
    from transformers import Adafactor  # takes long, and others are collected without it

    made: optim.Optimizer = Adafactor(parameters)  # type: ignore[no-untyped-call]
    return made


KINDS = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD")
ORDINARY: dict[str, Factory] = {
    **{kind: partial(getattr(optim, kind), lr=0.01) for kind in (*KINDS, "Adafactor")},
    **{f"{kind} by groups": by_module(partial(getattr(optim, kind), lr=0.01)) for kind in ("SGD", "AdamW")},
    **{f"{kind}, foreach": partial(getattr(optim, kind), lr=0.01, foreach=True) for kind in KINDS},
    **{f"{kind}, fused": by_module(partial(getattr(optim, kind), lr=0.01, fused=True)) for kind in ("SGD", "AdamW")},
    "nesterov": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "amsgrad": partial(optim.AdamW, lr=torch.tensor(0.1), amsgrad=True),
    "muon": muon_and_adam,
    "layer-wise": layer_wise,
    "transformers": from_transformers,
}


def test_ordinary_optimisers_are_not_refused() -> None:
    before = torch.get_rng_state(), torch.get_num_threads()
    for name, factory in ORDINARY.items():
        for stages in ([NAMES[:2], NAMES[2:3], NAMES[3:]], [NAMES[1:], [NAMES[0]]]):
            check_stages(factory, SHAPES, stages, together=ENDS)
        check_stages(factory, LARGE, halves(), together=ENDS)
        assert reason_for_one_stage(factory, LARGE) is None, name
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.get_num_threads() == before[1]


def script(optimizer: Factory, **fields: Any) -> Script:
    return Script(
        make=lambda: (Residual(), F.cross_entropy), samples=lambda: vectors(42), optimizer=optimizer, **fields
    )


@pytest.mark.parametrize(("stages", "replicas"), [(2, 1), (3, 2)])
def test_a_job_whose_optimiser_clips_is_refused_and_equal_with_the_keyword(stages: int, replicas: int) -> None:
    clips = script(partial(ClipsInside, lr=0.5))
    with pytest.raises(PlanError, match="clip_grad_norm"):
        run_over_functions(clips, stages=stages, replicas=replicas)
    mended = replace(clips, optimizer=partial(optim.SGD, lr=0.5), recipe={"clip_grad_norm": 0.1})
    found = run_over_functions(mended, stages=stages, replicas=replicas)
    difference, name = worst_difference(clips, found, run_script(clips)[0])
    assert difference < EQUAL, name


@pytest.mark.parametrize("kind", [partial(ClipsInside, lr=0.5), TrustRatio, Prodigy])
@pytest.mark.parametrize("replicas", [1, 2])
def test_it_trains_in_one_stage(kind: Factory, replicas: int) -> None:
    one = script(kind)
    found = run_over_functions(one, stages=1, replicas=replicas)
    difference, name = worst_difference(one, found, run_script(one)[0])
    assert difference < EQUAL, name


def planned(optimizer: Factory, *, sizes: int = 3, **asked: Any) -> Plan:
    """A plan of a profile whose best plan has several stages."""
    pipe = FuncPipe(Residual(), loss_fn=F.cross_entropy, optimizer=optimizer)
    asked = {"global_batch": 32, "time_value": 1000.0, "replicas": 1} | asked
    return pipe.optimize(profile=chain(7, sizes, seed=3), spec=platform(sizes), **asked)


def test_one_stage_is_planned_where_the_optimiser_needs_it(caplog: pytest.LogCaptureFixture) -> None:
    assert len(planned(partial(optim.SGD, lr=0.1)).stages) > 1
    assert caplog.text == ""
    assert len(planned(CLIPS["ClipsInside"]).stages) == 1
    assert "planned in one stage, because the optimiser, ClipsInside, does not train in two stages" in caplog.text
    assert (
        "for more stages, let FuncPipe clip, with clip_grad_norm=... (--set training.clip-grad-norm=NORM)"
        in caplog.text
    )
    assert len(planned(CLIPS["ClipsInside"], simulated_plans=2).stages) == 1


def test_an_optimiser_that_needs_one_stage_is_refused_where_there_can_be_none() -> None:
    cut = Pins(cuts=("layer2",))
    assert len(planned(optim.AdamW, pins=cut).stages) > 1
    with pytest.raises(PlanError, match="the pins begin a stage with layer2, but the optimiser, Normalised, does not"):
        planned(Normalised, pins=cut)
    small: dict[str, Any] = {"sizes": 1, "time_value": 0.0}
    assert len(planned(partial(optim.SGD, lr=0.1), **small).stages) > 1
    why = "all layers must be in one stage, because the optimiser, Normalised, does not"
    with pytest.raises(Infeasible, match=why):
        planned(Normalised, **small)
