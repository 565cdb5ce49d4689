"""Optimisers and schedulers that a user has made already, on the parameters of the model, as in a script of torch.

Functions train copies of the parameters, so that each needs an optimiser of its own. From a given one the factory is
found that makes the same: its class, the settings of its groups by the names of their parameters, and its defaults. It
is tried on the user's own parameters; where the result differs, the error has the factory to write. A scheduler is
copied, with another optimiser in place of its own.

What the given ones keep counts: a run begins with it, and leaves in them what plain training would.
"""

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from funcpipe.core.texts import error_text
from funcpipe.errors import InputError
from funcpipe.model.split.stage import trained_by
from funcpipe.training.losses import LossFunction
from funcpipe.training.norms import GradientNorm
from funcpipe.training.optimizers import (
    capture_optimizer,
    group_settings,
    join_tensors,
    kind_of,
    restore_groups,
    split_tensors,
)
from funcpipe.training.recipe import PREFIX
from funcpipe.training.state import SCHEDULER, StageState, capture_state, with_settings

_INITIAL = "initial_lr"
"""The setting of a group that shows that a scheduler was made on its optimiser."""


@dataclass(frozen=True)
class OptimizerCopy:
    """A factory of an optimiser of the class `kind`, whose `groups` have parameters of these names and settings."""

    kind: type[Optimizer]
    keywords: Mapping[str, Any]
    groups: tuple[tuple[tuple[str, ...], Mapping[str, Any]], ...]

    def __call__(self, named_parameters: Sequence[tuple[str, nn.Parameter]]) -> Optimizer:
        """Return the optimiser of these; those of other names are in no group."""
        own = dict(named_parameters)
        groups = [
            {"params": [own[name] for name in names if name in own], **copy.deepcopy(settings)}
            for names, settings in self.groups
        ]
        made: Any = self.kind
        optimizer: Optimizer = made(groups, **self.keywords)
        return optimizer


class _StandIn:
    """The optimiser of a scheduler that is not in use."""


@dataclass(frozen=True)
class SchedulerCopy:
    """A factory of a copy of `scheduler`, in which `stand_in` is the optimiser, whose groups have `settings`."""

    scheduler: LRScheduler
    stand_in: _StandIn
    settings: tuple[Mapping[str, Any], ...]

    def __call__(self, optimizer: Optimizer) -> LRScheduler:
        """Return a copy for `optimizer`."""
        LambdaLR(optimizer, lambda _: 1.0)  # as torch's own do, it has the optimiser count its steps
        for group, settings in zip(optimizer.param_groups, self.settings, strict=True):
            group.update(copy.deepcopy(settings))
        return copy.deepcopy(self.scheduler, {id(self.stand_in): optimizer})


@dataclass(frozen=True)
class Instances:
    """An optimiser that a user has made, and maybe a scheduler, with the factories of the same in functions."""

    optimizer: Optimizer
    scheduler: LRScheduler | None
    names: Mapping[int, str]
    make: OptimizerCopy
    make_scheduler: SchedulerCopy | None

    @property
    def has_begun(self) -> bool:
        """True if the optimiser differs from one that is made anew: it has taken steps, or was changed."""
        now: list[Any] = [group_settings(group) for group in self.optimizer.param_groups]
        before: list[Any] = [found for _, found in self.make.groups]
        if self.scheduler is not None and self.make_scheduler is not None:
            now.append(self.scheduler.state_dict())
            before = [*self.make_scheduler.settings, self.make_scheduler.scheduler.state_dict()]
        anew = self.make([(self.names[id(p)], p) for group in self.optimizer.param_groups for p in group["params"]])
        return not _same([*now, self.optimizer.state], [*before, anew.state])

    def state_in(self, before: StageState | None, model: nn.Module) -> StageState:
        """Return what they keep as the state of the whole model; all else is as `before`, if that is given.

        Raises InputError if the loss has parameters too, and there is nothing before.
        """
        if before is None and (others := self.names.values() - dict(model.named_parameters()).keys()):
            raise InputError(
                f"the optimiser, {kind_of(self.optimizer)}, has taken steps already, and trains {min(others)} of the "
                "loss; give one that is new"
            )
        state = capture_state(model, None, GradientNorm()) if before is None else before
        tensors: dict[str, Tensor] = {}
        settings: dict[str, Any] = {"optimizer": capture_optimizer(self.optimizer, self.names, tensors)}
        if self.scheduler is not None:
            found = split_tensors(self.scheduler.state_dict(), PREFIX, tensors)
            settings[SCHEDULER] = {"kind": type(self.scheduler).__name__, "state": found}
        return with_settings(state, settings, tensors)

    def restore(self, state: StageState) -> None:
        """Go to `state`, which training has left for the whole model."""
        saved = state.settings["optimizer"]
        if saved is None:
            return
        known = {name for group in saved["groups"] for name in group["parameters"]}
        trained = [[name for name in names if name in known] for names, _ in self.make.groups]
        restore_groups(saved["groups"], self.optimizer, trained, state.tensors)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if self.names[id(parameter)] in saved["state"]:
                    kept = join_tensors(saved["state"][self.names[id(parameter)]], state.tensors)
                    self.optimizer.state[parameter] = kept
        if self.scheduler is not None and SCHEDULER in state.settings:
            self.scheduler.load_state_dict(join_tensors(state.settings[SCHEDULER]["state"], state.tensors))

    def reset(self) -> None:
        """Be as when they were given, without what the optimiser kept."""
        self.optimizer.state.clear()
        for group, (_, settings) in zip(self.optimizer.param_groups, self.make.groups, strict=True):
            group.update(copy.deepcopy(settings))
        if self.scheduler is not None and self.make_scheduler is not None:
            for group, own in zip(self.optimizer.param_groups, self.make_scheduler.settings, strict=True):
                group.update(copy.deepcopy(own))
            self.scheduler.load_state_dict(copy.deepcopy(self.make_scheduler.scheduler.state_dict()))


def instances_of(model: nn.Module, loss: LossFunction, optimizer: object, scheduler: object) -> Instances | None:
    """Return what a user has made of these; None if both are factories.

    Raises InputError for an optimiser or a scheduler that cannot be made again, with the factory to write.
    """
    if not isinstance(optimizer, Optimizer):
        if isinstance(scheduler, LRScheduler):
            raise InputError(
                f"the scheduler, {type(scheduler).__name__}, is of an optimiser that was made already: give that too, "
                f"optimizer=scheduler.optimizer, or a factory, scheduler={_scheduler_text(scheduler)}"
            )
        return None
    own = scheduler if isinstance(scheduler, LRScheduler) else None
    if own is not None and own.optimizer is not optimizer:
        raise InputError(
            f"the scheduler, {type(own).__name__}, is of another optimiser than the one given; make it of that one, or "
            f"give a factory, scheduler={_scheduler_text(own)}"
        )
    names = {id(tensor): name for name, tensor in [*model.named_parameters(), *trained_by(loss).items()]}
    _check_can_be_told(optimizer, names, has_scheduler=own is not None)
    make = _copy_of(optimizer, names)
    return Instances(optimizer, own, names, make, None if own is None else _scheduler_copy(own, optimizer))


def _check_can_be_told(optimizer: Optimizer, names: Mapping[int, str], *, has_scheduler: bool) -> None:
    """Raise InputError for an optimiser of other parameters, or with what is kept beside it."""
    kind, groups = kind_of(optimizer), optimizer.param_groups
    strange = [p for group in groups for p in group["params"] if id(p) not in names]
    if strange:
        raise InputError(
            f"the optimiser, {kind}, holds {len(strange)} parameters that are none of the model's, the first of shape "
            f"{list(strange[0].shape)}; make it of the model that FuncPipe is given: {kind}(model.parameters(), …)"
        )
    if not has_scheduler and any(_INITIAL in group for group in groups):
        raise InputError(
            f"a scheduler was made on the optimiser, {kind}, and would not be stepped; give it too, scheduler=…, or "
            f"make the optimiser anew"
        )
    replaced = vars(optimizer).get("step")
    if replaced is not None and not hasattr(replaced, "_wrapped_by_lr_sched"):
        raise InputError(
            f"the step() of the optimiser, {kind}, was replaced, which functions would not know; override step() in a "
            f"subclass of it, and give that: {_optimizer_text(optimizer, names)}"
        )
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise InputError(
            f"the optimiser, {kind}, has hooks, which functions would not have; override step() in a subclass of it, "
            f"and give that: {_optimizer_text(optimizer, names)}"
        )


def _copy_of(optimizer: Optimizer, names: Mapping[int, str]) -> OptimizerCopy:
    """Return the factory of the same optimiser. Raises InputError if there is none."""
    keywords = {name: optimizer.defaults[name] for name in _taken(type(optimizer)) if name in optimizer.defaults}
    groups = tuple(
        (
            tuple(names[id(parameter)] for parameter in group["params"]),
            {name: copy.deepcopy(value) for name, value in group_settings(group).items() if name != _INITIAL},
        )
        for group in optimizer.param_groups
    )
    found = OptimizerCopy(type(optimizer), copy.deepcopy(keywords), groups)
    own = [(names[id(p)], p) for group in optimizer.param_groups for p in group["params"]]
    try:
        made = found(own)
    except Exception as error:  # whatever its constructor raises
        raise InputError(f"{_refusal(optimizer)}: {error_text(error)}; {_way_out(optimizer, names)}") from error
    for name, value in _own_attributes(optimizer).items():
        if name not in vars(made) or not _same(value, vars(made)[name]):
            raise InputError(f"{_refusal(optimizer)}: its {name} would be another; {_way_out(optimizer, names)}")
    return found


def _taken(kind: type[Optimizer]) -> Iterator[str]:
    """Yield the keywords that an optimiser's class takes; with **keywords, those of the classes that it extends too."""
    for one in kind.__mro__:
        if "__init__" not in vars(one):
            continue
        parameters = list(inspect.signature(vars(one)["__init__"]).parameters.values())[2:]  # after the parameters
        yield from (each.name for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL))
        if all(each.kind is not each.VAR_KEYWORD for each in parameters):
            return


def _own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return what an optimiser has besides its groups and its state, its defaults included."""
    plain = vars(SGD([nn.Parameter(torch.zeros(()))])).keys() - {"defaults"}
    hidden = {*plain, "step", "_opt_called"}
    return {name: value for name, value in vars(optimizer).items() if name not in hidden}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _refusal(optimizer: Optimizer) -> str:
    return f"the optimiser, {kind_of(optimizer)}, cannot be made again in each function from what it keeps"


def _way_out(optimizer: Optimizer, names: Mapping[int, str]) -> str:
    return f"give what makes it: {_optimizer_text(optimizer, names)}"


def _optimizer_text(optimizer: Optimizer, names: Mapping[int, str]) -> str:
    """Return the factory of an optimiser as a user writes it; of names, the first few of each group."""
    arguments = _arguments_text(type(optimizer), optimizer.defaults, skipped=2)
    groups = optimizer.param_groups
    if len(groups) == 1:
        return f"optimizer=lambda parameters: {kind_of(optimizer)}(parameters{arguments})"
    parts = []
    for group in groups:
        own = [names[id(p)] for p in group["params"]]
        listed = ", ".join(map(repr, own[:3])) + (", …" if len(own) > 3 else "")
        other = {
            name: value
            for name, value in group_settings(group).items()
            if name in optimizer.defaults and not _same(value, optimizer.defaults[name])
        }
        settings = "".join(f", {name!r}: {value!r}" for name, value in other.items())
        parts.append(f"{{'params': [p for name, p in named_parameters if name in ({listed},)]{settings}}}")
    return f"optimizer=lambda named_parameters: {kind_of(optimizer)}([{', '.join(parts)}]{arguments})"


def _scheduler_copy(scheduler: LRScheduler, optimizer: Optimizer) -> SchedulerCopy:
    """Return the factory of the same scheduler. Raises InputError if it cannot be copied."""
    stand_in = _StandIn()
    try:
        copied = copy.deepcopy(scheduler, {id(optimizer): stand_in})
    except Exception as error:  # whatever it holds
        raise InputError(
            f"the scheduler, {type(scheduler).__name__}, cannot be copied for each function: {error_text(error)}; give "
            f"what makes it: scheduler={_scheduler_text(scheduler)}"
        ) from error
    settings = tuple(copy.deepcopy(group_settings(group)) for group in optimizer.param_groups)
    return SchedulerCopy(copied, stand_in, settings)


def _scheduler_text(scheduler: LRScheduler) -> str:
    """Return the factory of a scheduler as a user writes it."""
    kind = type(scheduler)
    return f"lambda optimizer: {kind.__name__}(optimizer{_arguments_text(kind, vars(scheduler), skipped=2)})"


def _arguments_text(kind: type, values: Mapping[str, Any], *, skipped: int) -> str:
    """Return the keywords of a constructor after its first arguments: those that differ from their defaults."""
    texts = []
    for each in list(inspect.signature(kind.__init__).parameters.values())[skipped:]:  # type: ignore[misc]
        if each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL) or each.name == "last_epoch":
            continue
        known = each.name in values
        if known and (each.default is each.empty or not _same(values[each.name], each.default)):
            texts.append(f", {each.name}={values[each.name]!r}")
        elif not known and each.default is each.empty:
            texts.append(f", {each.name}=…")
    return "".join(texts)
