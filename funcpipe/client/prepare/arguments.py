"""Checks of the user's arguments to FuncPipe: values of a wrong kind are refused at once."""

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields
from enum import Enum
from typing import Any, NoReturn, ParamSpec, TypeVar, get_args

import torch
from torch import nn

from funcpipe.client.prepare.session import Site
from funcpipe.client.prepare.weights import ModelWeights, WeightSource, open_model
from funcpipe.core import FaultTolerance, Pins, PlatformSpec, RunLimits, Validation, checks
from funcpipe.errors import InputError, InvalidValue, PlanError
from funcpipe.platforms.catalog import load_spec
from funcpipe.scheduler.simulator.disturbances import Disturbances

T = TypeVar("T")
P = ParamSpec("P")

AnySpec = str | PlatformSpec
"""A platform's specification, or its name."""

_EAGER = "functions run stages eagerly, as they have no C++ compiler (docs/training.md, Compiled stages)"
_MEASURED = (
    "With one, compiling took 14 to 37 s at each start of a function, ran small models at 1.0 to 1.2 times the speed, "
    "and gave other bits (docs/training.md)"
)
_WAY_OUT = "Leave that out, or give what torch.compile was given, compiled._orig_mod, which has the same weights"

_SCRIPT = (
    "must not be TorchScript, which can be neither divided nor sent to functions. Give what torch.jit.script or "
    "torch.jit.trace was given; a module takes the weights by load_state_dict(scripted.state_dict())"
)


_HOLDERS = {
    "limits": RunLimits,
    "faults": FaultTolerance,
    "validation": Validation,
    "pins": Pins,
    "disturbances": Disturbances,
}
"""The settings of each argument, whose fields are easily given as arguments themselves."""

_ASKED_FIRST = ("train", "optimize", "profile", "evaluate")

_FROM_ELSEWHERE = {
    **dict.fromkeys(
        ("device", "devices", "gpus", "accelerator"),
        "functions compute on processors, and the module stays where it is; leave it out (`funcpipe provision compare` "
        "says where a GPU is cheaper)",
    ),
    **dict.fromkeys(
        ("lr", "learning_rate", "momentum", "weight_decay"),
        "it is the optimiser's: optimizer=partial(torch.optim.SGD, lr=…)",
    ),
    "batch_size": "samples of a step are optimize(global_batch=…), those that a function takes at once "
    "profile(micro_batch=…)",
    **dict.fromkeys(
        ("num_workers", "collate_fn", "batch_sampler", "sampler"),
        "give a DataLoader as the data, which says how samples are loaded",
    ),
    **dict.fromkeys(("criterion", "loss"), "the loss is FuncPipe(loss_fn=…)"),
}
"""Arguments as other libraries call them, and where they belong here."""


def strict(verb: Callable[P, T]) -> Callable[P, T]:
    """`verb` of FuncPipe, which refuses keywords that it does not take with where they belong. Raises InputError."""
    known = _keywords(verb)

    @functools.wraps(verb)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in kwargs.keys() - known.keys():
            _refuse_keyword(verb.__name__, name, known, type(args[0]) if args else object)
        return verb(*args, **kwargs)

    return call


def _keywords(verb: Callable[..., object]) -> dict[str, None]:
    found: dict[str, None] = {}
    for name, parameter in inspect.signature(verb).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            (kind,) = get_args(parameter.annotation)  # a TypedDict, unpacked
            found |= dict.fromkeys(kind.__annotations__)
        elif name != "self":
            found[name] = None
    return found


def _refuse_keyword(verb: str, name: str, known: Collection[str], owner: type) -> NoReturn:
    title = "FuncPipe" if verb == "__init__" else verb
    if name in _FROM_ELSEWHERE:
        raise InputError(f"{title} takes no {name}=: {_FROM_ELSEWHERE[name]}")
    for argument, kind in _HOLDERS.items():
        if argument in known and name in {field.name for field in fields(kind)}:
            raise InputError(f"{title} takes no {name}=: give it in {argument}={kind.__name__}({name}=…)")
    verbs = {each: getattr(owner, each) for each in dir(owner) if not each.startswith("_")}
    for other in dict.fromkeys((*_ASKED_FIRST, *verbs)):
        if callable(verbs.get(other)) and name in _keywords(verbs[other]):
            raise InputError(f"{title} takes no {name}=: give it to {other}({name}=…)")
    near = difflib.get_close_matches(name, known, n=1)
    rest = f"did you mean {near[0]}=?" if near else f"it takes {', '.join(known)}"
    raise InputError(f"{title} takes no {name}=; {rest}")


def opened(factory: object, weights: WeightSource) -> tuple[nn.Module, ModelWeights]:
    """The module that `factory` makes, with `weights`. Raises InvalidValue unless it is a function that makes one."""
    if isinstance(factory, nn.Module) or not callable(factory):
        rule = "must be a function that makes the module where weights= says what it begins with: lambda: Model(…)"
        raise InvalidValue("model", type(factory).__name__, rule)
    return open_model(factory, weights)


def learner(model: object, *, loss_fn: Callable[..., Any] | None, blocks: Sequence[str]) -> nn.Module:
    """`model`. Raises InvalidValue unless these are a module that is made already, a function, and paths of modules."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise InvalidValue(
            "model", model.__name__, f"must be a module, not its class: FuncPipe({model.__name__}(…), …)"
        )
    if not isinstance(model, nn.Module):
        way_out = ": call it, FuncPipe(make(), …), or give weights=, the files to begin with" if callable(model) else ""
        raise InvalidValue("model", model, f"must be a torch.nn.Module{way_out}")
    if loss_fn is not None and not callable(loss_fn):
        raise InvalidValue("loss_fn", loss_fn, "must be a function of output and target, or None")
    if isinstance(loss_fn, type):
        raise InvalidValue(
            "loss_fn", loss_fn.__name__, f"must be a function, not a class: loss_fn={loss_fn.__name__}()"
        )
    if isinstance(blocks, str):
        raise InvalidValue("blocks", blocks, f"must be a sequence of paths: blocks=[{blocks!r}]")
    return model


def check_eager(model: nn.Module, loss_fn: object, *, compile: object) -> None:
    """Raise InvalidValue for `compile`, and for a model, a module in it or a loss that is compiled already.

    By torch.compile, or as TorchScript.
    """
    if compile is not False:
        raise InvalidValue("compile", compile, f"must be left out: {_EAGER}. {_MEASURED}")
    for field, value in (("model", model), ("loss_fn", loss_fn)):
        modules = value.named_modules() if isinstance(value, nn.Module) else ()
        for path, module in modules:
            if isinstance(module, torch.jit.ScriptModule):
                raise InvalidValue(f"{field}.{path}".rstrip("."), "a torch.jit.ScriptModule", _SCRIPT)
            if how := _compiled(module):
                raise InvalidValue(f"{field}.{path}".rstrip("."), how, f"must not be compiled: {_EAGER}. {_WAY_OUT}")
    if isinstance(loss_fn, torch.jit.ScriptFunction):
        raise InvalidValue("loss_fn", "a torch.jit.ScriptFunction", _SCRIPT)
    if _is_compiled(loss_fn):
        raise InvalidValue("loss_fn", loss_fn, f"must not be compiled: {_EAGER}. {_WAY_OUT}")


def _compiled(module: nn.Module) -> str | None:
    """The way that a module itself was compiled; None if it was not."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # whose import is slow; without it nothing is compiled
    if dynamo is not None and isinstance(module, dynamo.OptimizedModule):
        return "torch.compile(module)"
    if module._compiled_call_impl is not None:
        return "module.compile()"
    return "@torch.compile of its forward" if _is_compiled(module.forward) else None


def _is_compiled(function: object) -> bool:
    marked = hasattr(function, "_torchdynamo_orig_callable")
    return marked and not hasattr(function, "_torchdynamo_disable")  # as torch.compiler.disable marks what it wraps


def check_profiling(sample: object, on: object, *, micro_batch: int, repeats: int, layers: int) -> None:
    """Raise InvalidValue for what cannot be the inputs of a module, or a site, or a number of these."""
    if sample is None or isinstance(sample, str | bytes | int | float) or callable(sample):
        rule = (
            "must be one micro-batch of inputs, a tensor, a tuple of tensors or a dict of them by name, or a DataLoader"
        )
        raise InvalidValue("sample_inputs", sample, rule)
    if on is not None and not isinstance(on, Site):
        raise InvalidValue("on", on, "must be an open Site: with open_site('local') as site: profile(…, on=site)")
    checks.whole("micro_batch", micro_batch, 1)
    checks.whole("repeats", repeats, 0 if on is None else 1)
    checks.whole("layers", layers, 1)


def check_planning(pins: object, time_limit_s: float | None, simulated_plans: int, policy: str, solver: str) -> None:
    """Raise InvalidValue unless these are pins, a time, and how many plans of our own search are simulated."""
    checks.kind_of("pins", pins, Pins)
    if time_limit_s is not None:
        checks.positive("time_limit_s", time_limit_s)
    checks.whole("simulated_plans", simulated_plans, 0)
    if simulated_plans and (policy, solver) != ("funcpipe", "auto"):
        raise InvalidValue("simulated_plans", simulated_plans, "must be 0 with another policy or solver")


def counts(replicas: Sequence[int] | int | None) -> tuple[int, ...] | None:
    """Degrees of data parallelism, as a TrainingSpec takes them."""
    return None if replicas is None else (replicas,) if isinstance(replicas, int) else tuple(replicas)


def check_run(faults: object, limits: object) -> None:
    """Raise InvalidValue unless these are what a run takes."""
    checks.kind_of("faults", faults, FaultTolerance)
    checks.kind_of("limits", limits, RunLimits)


def choices(**given: Enum | str | None) -> dict[str, Any]:
    """Choices of a TrainingSpec, which reads strings itself; `auto` is None but for `recompute`, which has it."""
    return {name: None if value == "auto" and name != "recompute" else value for name, value in given.items()}


def spec_of(platform: AnySpec) -> PlatformSpec:
    """The specification of a platform that is given itself or by its name. Raises InvalidValue."""
    if isinstance(platform, str):
        return load_spec(platform)
    checks.kind_of("platform", platform, PlatformSpec)
    return platform


def given(field: str, value: T | None, kind: type[T]) -> T:
    """The profile or the plan; raises PlanError if there is none yet, InvalidValue if it is something else."""
    if value is None:
        verb = {"profile": "profile", "plan": "optimize"}[field]
        raise PlanError(f"there is no {field} yet; call {verb}() first, or give one")
    checks.kind_of(field, value, kind)
    return value
