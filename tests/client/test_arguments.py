"""What is passed to FuncPipe and is of another kind: told at once, with the way out."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from funcpipe import FuncPipe, InputError, Pins, Plan, ScheduleKind, Wire
from tests.e2e import small

loss = nn.functional.cross_entropy
optimizer = partial(torch.optim.SGD, lr=0.1)


def pipe(model: Any = None, **options: Any) -> FuncPipe:
    given: dict[str, Any] = {"loss_fn": loss, "optimizer": optimizer, **options}
    return FuncPipe(small.model() if model is None else model, **given)


@pytest.fixture(scope="module")
def profiled() -> FuncPipe:
    made = pipe()
    with mock.patch("funcpipe.profiler.profile.base_memory_bytes", return_value=200 << 20):  # or a process measures it
        made.profile(small.sample(), platform="local", micro_batch=2, repeats=1)
    return made


def planned(profiled: FuncPipe, **options: Any) -> Plan:
    return profiled.optimize(**{"global_batch": 8} | options)


def trained(profiled: FuncPipe, **options: Any) -> Any:
    return profiled.train(small.data, **{"plan": small.plan()} | options)


MISTAKES: dict[str, tuple[Callable[[FuncPipe], object], str]] = {
    "a factory": (lambda _: pipe(small.model), r"must be a torch.nn.Module: call it, FuncPipe\(make\(\), …\)"),
    "a class": (lambda _: pipe(nn.Linear), r"not its class: FuncPipe\(Linear\(…\), …\)"),
    "a number": (lambda _: pipe(3), "must be a torch.nn.Module, got 3"),
    "class of a loss": (lambda _: pipe(loss_fn=nn.CrossEntropyLoss), r"loss_fn=CrossEntropyLoss\(\)"),
    "name of a loss": (lambda _: pipe(loss_fn="ce"), "loss_fn must be a function of output and target"),
    "clip": (lambda _: pipe(clip_grad_norm=-1), "clip_grad_norm must be above 0"),
    "blocks": (lambda _: pipe(blocks="0"), r"must be a sequence of paths: blocks=\['0'\]"),
    "no profile": (lambda _: planned(pipe()), r"no profile yet; call profile\(\) first"),
    "no plan": (lambda _: pipe().simulate(), r"no plan yet; call optimize\(\) first"),
    "no sample": (lambda p: p.profile(None), "sample_inputs must be one micro-batch of inputs"),  # type: ignore[arg-type]
    "factory of samples": (lambda p: p.profile(small.sample), "must be one micro-batch"),  # type: ignore[arg-type]
    "micro-batch": (lambda p: p.profile(small.sample(), micro_batch=-3), "micro_batch must be a whole number"),
    "repeats": (lambda p: p.profile(small.sample(), repeats=-1), "repeats must be a whole number"),
    "platform": (lambda p: p.profile(small.sample(), platform="mars"), "platform must be one of"),
    "no platform": (lambda p: p.profile(small.sample(), platform=3), "must be a PlatformSpec"),  # type: ignore[arg-type]
    "on": (lambda p: p.profile(small.sample(), on="local"), "with open_site"),  # type: ignore[arg-type]
    "wire": (lambda p: planned(p, wire="bf61"), "wire must be one of fp32, bf16, fp16, int8, got 'bf61'"),
    "schedule": (lambda p: planned(p, schedule="1fib"), "schedule must be one of gpipe, 1f1b"),
    "sync": (lambda p: planned(p, sync="x"), "sync must be one of three-phase"),
    "recompute": (lambda p: planned(p, recompute=True), "recompute must be one of never, auto, got True"),
    "batch as text": (lambda p: planned(p, global_batch="8"), "global_batch must be a whole number"),
    "half a batch": (lambda p: planned(p, global_batch=8.5), "global_batch must be a whole number"),
    "time limit": (lambda p: planned(p, time_limit_s=-1), "time_limit_s must be above 0"),
    "plans to simulate": (
        lambda p: planned(p, simulated_plans=-1),
        "simulated_plans must be a whole number of at least 0",
    ),
    "simulated policy": (
        lambda p: planned(p, simulated_plans=3, policy="lambdaml"),
        "simulated_plans must be 0 with another policy or solver, got 3",
    ),
    "pins": (lambda p: planned(p, pins="layer1"), "pins must be a Pins, got 'layer1'"),
    "file of a profile": (lambda p: planned(p, profile="profile.json"), "profile must be a ModelProfile"),
    "file of a plan": (lambda p: trained(p, plan="plan.json"), "plan must be a Plan, got 'plan.json'"),
    "faults": (lambda p: trained(p, faults={"on_oom": "grow"}), "faults must be a FaultTolerance"),
    "limits": (lambda p: trained(p, limits=5), "limits must be a RunLimits, got 5"),
    "settings": (lambda p: trained(p, settings="x"), "settings must be a RunSettings"),
    "epochs": (lambda p: trained(p, epochs=0), "epochs must be a whole number of at least 1"),
    "half an epoch": (lambda p: trained(p, epochs=1.5), "epochs must be a whole number"),
    "seed": (lambda p: trained(p, seed=-1), "seed must be a whole number of at least 0"),
    "typo": (lambda p: trained(p, epoch=3), r"did you mean epochs=\?"),
    "storage": (lambda p: trained(p, storage="oss://bucket/x"), r"oss://BUCKET/PREFIX\?endpoint="),
    "steps": (lambda p: p.verify(small.data, steps=0, plan=small.plan()), "steps must be a whole number"),
    "tolerance": (lambda p: p.verify(small.data, tolerance=-1, plan=small.plan()), "tolerance must be above 0"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told(name: str, profiled: FuncPipe) -> None:
    call, message = MISTAKES[name]
    with pytest.raises(InputError, match=message):
        call(profiled)


def test_strings_and_single_numbers_are_accepted(profiled: FuncPipe) -> None:
    plan = profiled.optimize(
        global_batch=8, wire="bf16", schedule="1f1b", sync="auto", recompute="never", replicas=2, spec="local"
    )
    assert (plan.wire, plan.schedule, plan.replicas) == (Wire.BF16, ScheduleKind.ONE_F_ONE_B, 2)
    assert plan.made_for is not None
    assert (plan.made_for.sync, plan.made_for.replicas) == (None, (2,))


def test_formats_are_asked_for_or_left_to_the_planner(profiled: FuncPipe) -> None:
    asked = profiled.optimize(global_batch=8, replicas=2, wire_sync="bf16", spec="local")
    assert (asked.wire, asked.wire_sync) == (Wire.FP32, Wire.BF16)
    free = profiled.optimize(global_batch=8, replicas=2, numerics="bf16", pins=Pins(cuts=("2",)), spec="local")
    assert (free.wire, free.wire_sync) == (Wire.BF16, Wire.BF16)


def test_a_plan_for_another_width_is_refused_before_anything_starts(profiled: FuncPipe) -> None:
    plan = planned(profiled)
    wider = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))
    taken = [stage.parameter_bytes for stage in plan.stages]
    assert sum(size or 0 for size in taken) == sum(p.nbytes for p in small.model().parameters())
    with pytest.raises(InputError, match=r"for another model: the trainable parameters of stage 0 take \d+ bytes"):
        pipe(wider).train(small.data, plan=plan)


PIPE: Any = pipe()
NEW: Any = FuncPipe


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: NEW(PIPE.model, device="cuda"), "FuncPipe takes no device=: functions compute on processors"),
        (lambda: NEW(PIPE.model, lr=0.1), r"FuncPipe takes no lr=: .*optimizer=partial\(torch.optim.SGD, lr="),
        (lambda: NEW(PIPE.model, optimiser=len), r"FuncPipe takes no optimiser=; did you mean optimizer=\?$"),
        (lambda: NEW(PIPE.model, clip_gradnorm=1), r"FuncPipe takes no clip_gradnorm=; did you mean clip_grad_norm="),
        (lambda: NEW(PIPE.model, epochs=3), r"FuncPipe takes no epochs=: give it to train\(epochs=…\)"),
        (lambda: NEW(PIPE.model, shape=3), "FuncPipe takes no shape=; it takes model, loss_fn, optimizer, name, "),
        (lambda: PIPE.train([], batch_size=8), r"train takes no batch_size=: .*optimize\(global_batch=…\)"),
        (lambda: PIPE.train([], stroage="file:///a"), r"train takes no stroage=; did you mean storage=\?$"),
        (lambda: PIPE.train([], max_usd=1), r"train takes no max_usd=: give it in limits=RunLimits\(max_usd=…\)"),
        (
            lambda: PIPE.start([], checkpoint_steps=1),
            r"start .*: give it in faults=FaultTolerance\(checkpoint_steps=…\)",
        ),
        (lambda: PIPE.train([], metrics={}), r"train takes no metrics=: give it in validation=Validation\(metrics=…\)"),
        (lambda: PIPE.optimize(globalbatch=3), r"optimize takes no globalbatch=; did you mean global_batch=\?$"),
        (lambda: PIPE.optimize(global_batch=3, cuts=()), r"optimize takes no cuts=: give it in pins=Pins\(cuts=…\)"),
        (
            lambda: PIPE.profile((), global_batch=3),
            r"profile takes no global_batch=: give it to optimize\(global_batch=…\)",
        ),
        (lambda: PIPE.verify([], storage=""), r"verify takes no storage=: give it to train\(storage=…\)"),
    ],
)
def test_keywords_that_a_verb_does_not_take_are_refused_with_where_they_belong(
    call: Callable[[], object], message: str
) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        call()


def test_verbs_show_what_they_take() -> None:
    assert "global_batch" in inspect.signature(PIPE.optimize).parameters
    assert list(inspect.signature(FuncPipe).parameters)[:3] == ["model", "loss_fn", "optimizer"]
    assert (FuncPipe.train.__doc__ or "").startswith("Train the module over functions")
