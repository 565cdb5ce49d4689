"""Refuses plans that divide an optimiser which cannot be divided, and says what to do instead.

Plain PyTorch has one optimiser; a run has one for each stage and, with `shard_optimizer`, one for each replica's share
of a stage. Small ones of both kinds are given the same gradients, and must agree to the last bit: what is computed for
a parameter is the same, whichever others are updated beside it.

    plain PyTorch      [ a  b  c  d ]
    two stages         [ a  b ] [ c  d ]
    divided as well    [ a  b ] [ c  d ], each with every parameter cut in two

All gradients lie about in one direction, so that an optimiser that adapts its own learning rate finds one. They are
small at first: an optimiser that agrees until they become large clips them.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from funcpipe.core import Routes
from funcpipe.core.texts import error_text
from funcpipe.errors import PlanError
from funcpipe.model.draws import SHARED_GENERATORS, reseed
from funcpipe.model.graph.isolation import in_turn
from funcpipe.model.tensors import one_thread
from funcpipe.training.gradients import Layout
from funcpipe.training.optimizers import (
    OptimizerFactory,
    ParameterShape,
    are_equal,
    call_factory,
    group_settings,
    kind_of,
    small_shapes,
    stage_optimizer,
)
from funcpipe.training.sharding import ShardedOptimizer, has_cut_state

_SMALL_STEPS = 12

_NORMS = (*[1e-3] * _SMALL_STEPS, 1.0, 1e2, 1e4, 1e6, 0.0, 1.0)

_CUT_NORMS = (30.0, 3e5, 3e-3, 0.0, 30.0, 1e7, 10.0, 3.0, 30.0, 1.0, 30.0)
"""The norms of the gradients of all parameters together, step by step; those where parameters are cut go up and down,
which shows whether rounding depends on where an element stands.
"""

_NOISE = (0.3, -0.8, 0.5, 0.1, -0.4)

_SCALES = (1.0, 0.1, 4.0)
"""The share of noise in a gradient, by step, and its size, by parameter. Both are repeated."""

_MOST, _MOST_CUT = 32, 12
"""About so many parameters are tried, whole and cut."""


class _Cause(Enum):
    """The cause of a difference between the parts and the whole."""

    TOGETHER = "together"  # what is done to one parameter depends on others
    CLIPS = "clips"  # so it does, but with large gradients alone
    DRAWS = "draws"  # it draws random numbers, one parameter after the other
    FAILS = "fails"  # its step raises an error
    STATE = "state"  # what it keeps for a parameter cannot be cut with it


@dataclass(frozen=True, slots=True, kw_only=True)
class _Difference:
    """The first difference of an optimiser of a part from one for all parameters.

    `part` is its number; None if the one for all cannot be tried. `parameter` is the name of the first one that
    differs, `error` what was raised.
    """

    optimizer: str
    cause: _Cause
    part: int | None = None
    parameter: str = ""
    error: str = ""


def _find_difference(
    factory: OptimizerFactory,
    shapes: Sequence[ParameterShape],
    parts: Sequence[Collection[str]],
    *,
    cut: bool = False,
) -> _Difference | None:
    """Return the first difference between the optimiser that `factory` makes of a model with these trainable
    parameters, and those of its `parts`, each given by the names of its parameters; None if there is none.

    Parameters of no part never have a gradient. With `cut` each part is divided too, inside each of its parameters.
    """
    with SHARED_GENERATORS.computing(), torch.random.fork_rng(devices=[]), one_thread():
        small = small_shapes(shapes)
        each = max(2, (_MOST_CUT if cut else _MOST) // max(1, len(parts)))
        chosen = _chosen(factory, small, parts, each)
        idle = [shape.name for shape in small if not any(shape.name in part for part in parts)][:_MOST]
        start = _drawn(small, {*idle}.union(*chosen), scale=0.1, seed=0)
        whole = _Trial(factory, small, start)
        kind = _CutTrial if cut else _Trial
        alone = {
            number: kind(factory, small, {name: start[name] for name in names})
            for number, names in enumerate(chosen)
            if names
        }
        gradients = _gradients(small, set[str]().union(*chosen), _CUT_NORMS if cut else _NORMS)
        return _compared(whole, alone, gradients)


class _Trial:
    """An optimiser, and the small parameters that it updates."""

    def __init__(
        self, factory: OptimizerFactory, shapes: Sequence[ParameterShape], start: Mapping[str, Tensor]
    ) -> None:
        self.own = {name: nn.Parameter(tensor.clone()) for name, tensor in start.items()}
        self.optimizer = stage_optimizer(factory, self.own, shapes)

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        for name, parameter in self.own.items():
            parameter.grad = gradients[name].clone() if name in gradients else None
        self.optimizer.step()

    def changed_otherwise(self, whole: "_Trial", *, kept: bool) -> str | None:
        """The first parameter that differs from that of `whole`, or with `kept`, of which something else is kept."""
        for name, parameter in self.own.items():
            same = are_equal(parameter, whole.own[name])
            if not same or (kept and not _same(self._kept(name), whole._kept(name))):
                return name
        return None

    def _kept(self, name: str) -> object:
        """Return the optimiser's state of a parameter, and the settings of its group."""
        parameter = self.own[name]
        groups = [group for group in self.optimizer.param_groups if any(p is parameter for p in group["params"])]
        return [dict(self.optimizer.state.get(parameter, {})), *map(group_settings, groups)]

    def has_cut_state(self) -> bool:
        return True


class _CutTrial(_Trial):
    """An optimiser of which each update holds the end of one parameter and the beginning of the next."""

    def __init__(
        self, factory: OptimizerFactory, shapes: Sequence[ParameterShape], start: Mapping[str, Tensor]
    ) -> None:
        super().__init__(factory, shapes, start)
        self._layout = Layout(tuple(self.own.values()), [])
        places = [self._layout.slice_of(number) for number in range(len(self.own))]
        inside = [
            min(place.start + ((place.stop - place.start) // 3 | 1), place.stop) for place in places
        ]  # not aligned
        self._ranges = [*zip([0, *inside], [*inside, self._layout.elements], strict=True)][::-1]
        self._sharded = ShardedOptimizer(self.optimizer, self._layout, self._ranges)

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        flat = torch.cat([gradients[name].reshape(-1).to(self._layout.dtype) for name in self.own])
        flat.add_(0.0)  # -0.0 would stand for no gradient
        for number, (start, stop) in enumerate(self._ranges):
            self._sharded.update(number, flat[start:stop])
        with torch.no_grad():
            for number, parameter in enumerate(self.own.values()):
                parameter.copy_(flat[self._layout.slice_of(number)].view_as(parameter))

    def _kept(self, name: str) -> object:
        return None  # which is in parts, too

    def has_cut_state(self) -> bool:
        return has_cut_state(self._sharded)


class _StepFails(Exception):
    """The optimiser of a part, of that number, or the one for all, has raised an error."""

    def __init__(self, part: int | None, error: Exception) -> None:
        super().__init__(error_text(error))
        self.part = part


def _step(trial: _Trial, gradients: Mapping[str, Tensor], seed: int, part: int | None = None) -> bool:
    """Take a step, with the generators seeded as in every function; whether numbers were drawn from them."""
    reseed(seed)
    before = torch.get_rng_state()
    try:
        trial.step(gradients)
    except Exception as error:  # whatever a user's optimiser raises
        raise _StepFails(part, error) from error
    return not torch.equal(torch.get_rng_state(), before)


def _compared(whole: _Trial, alone: Mapping[int, _Trial], steps: Iterator[Mapping[str, Tensor]]) -> _Difference | None:
    found = partial(_Difference, optimizer=kind_of(whole.optimizer))
    last = len(_NORMS) - 1
    try:
        for number, gradients in enumerate(steps):
            if _step(whole, gradients, number):
                return found(cause=_Cause.DRAWS)
            for part, one in alone.items():
                _step(one, gradients, number, part)
                name = one.changed_otherwise(whole, kept=number in (_SMALL_STEPS - 1, last))
                if name is not None:
                    cause = _Cause.TOGETHER if number < _SMALL_STEPS else _Cause.CLIPS
                    return found(cause=cause, part=part, parameter=name)
    except _StepFails as failure:
        return found(cause=_Cause.FAILS, part=failure.part, error=str(failure))
    uncut = [part for part, one in alone.items() if not one.has_cut_state()]
    return found(cause=_Cause.STATE, part=uncut[0]) if uncut else None


def _same(one: object, other: object) -> bool:
    """Return True if an optimiser keeps the same tensors and numbers; anything else that it keeps is ignored."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and are_equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, int | float) and isinstance(other, int | float):
        return one == other or (math.isnan(one) and math.isnan(other))
    return True


def _chosen(
    factory: OptimizerFactory, shapes: Sequence[ParameterShape], parts: Sequence[Collection[str]], each: int
) -> list[list[str]]:
    """Up to `each` parameters of a part by name, in the model's order: those that come first in their groups."""
    named = [(shape.name, shape.stand_in()) for shape in shapes]
    rank = _ranks(call_factory(factory, named))
    last = len(named)
    chosen = []
    for part in parts:
        own = [(rank.get(id(parameter), last), name) for name, parameter in named if name in part]
        kept = {name for _, name in sorted(own, key=lambda ranked: ranked[0])[:each]}
        chosen.append([name for _, name in own if name in kept])
    return chosen


def _ranks(optimizer: Optimizer) -> dict[int, int]:
    """Return the place of each parameter in its group, by its id."""
    return {id(p): place for group in optimizer.param_groups for place, p in enumerate(group["params"])}


def _drawn(shapes: Sequence[ParameterShape], names: Collection[str], *, scale: float, seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        shape.name: torch.randn(shape.shape, dtype=shape.dtype, generator=draw).mul_(scale)
        for shape in shapes
        if shape.name in names
    }


def _gradients(
    shapes: Sequence[ParameterShape], names: Collection[str], norms: Sequence[float]
) -> Iterator[dict[str, Tensor]]:
    """Yield the gradients of each step, of about these norms."""
    direction = _drawn(shapes, names, scale=1.0, seed=1)
    noise = _drawn(shapes, names, scale=1.0, seed=2)
    elements = max(1, sum(tensor.numel() for tensor in direction.values()))
    for step, norm in enumerate(norms):
        alpha, unit = _NOISE[step % len(_NOISE)], norm / elements**0.5
        yield {
            name: _finite(torch.add(tensor, noise[name], alpha=alpha).mul_(unit * _SCALES[number % len(_SCALES)]))
            for number, (name, tensor) in enumerate(direction.items())
        }


def _finite(gradient: Tensor) -> Tensor:
    """Return `gradient` in the range of its dtype, which is small for float16."""
    if gradient.dtype is not torch.float16:
        return gradient
    most = torch.finfo(torch.float16).max / 4
    return gradient.clamp_(-most, most)


@in_turn()
def reason_for_one_stage(factory: OptimizerFactory, shapes: Sequence[ParameterShape]) -> str | None:
    """Return why a model with these trainable parameters must not be cut, in words; None if it may be.

    It is cut in the middle, and one parameter behind it: what belongs together may lie on one of these.
    """
    names = [shape.name for shape in shapes]
    found = None
    for cut in range(len(names) // 2, len(names) // 2 + 2):
        if 0 < cut < len(names):
            found = _find_difference(factory, shapes, [names[:cut], names[cut:]])
            if found is None or _is_untried(found):
                return None
    return None if found is None else f"{_text(found, 'in two stages')}; for more stages, {_instead(found)}"


def check_stages(
    factory: OptimizerFactory,
    shapes: Sequence[ParameterShape],
    stages: Sequence[Collection[str]],
    *,
    together: tuple[str, str],
) -> None:
    """Raise PlanError unless optimisers of `stages`, each given by the names of its parameters, do what one for all
    trainable parameters, `shapes`, does.

    `together` are the model's first and last layer.
    """
    idle = [shape.name for shape in shapes if not any(shape.name in stage for stage in stages)]
    if len(stages) < 2 and not idle:
        return
    found = _find_difference(factory, shapes, stages)
    if found is None or _is_untried(found):
        return
    if len(stages) < 2:
        if found.cause is not _Cause.DRAWS:
            raise PlanError(
                f"{_text(found, 'in one stage')}; the model's forward does not use {idle[0]}, which no stage holds: "
                "leave that out of the optimiser, or choose one that updates each parameter by itself"
            )
        return
    raise PlanError(
        f"{_text(found, f'in the {len(stages)} stages of the plan')}; {_instead(found)}, or plan with one stage "
        f"(pins=Pins(together=[{together!r}]), on the command line --set plan.together={','.join(together)})"
    )


def _is_untried(found: _Difference) -> bool:
    """Return True if the optimiser for all parameters cannot work with small ones, and so is not known."""
    return found.cause is _Cause.FAILS and found.part is None


def _text(found: _Difference, where: str) -> str:
    text = f"the optimiser, {found.optimizer}, does not train {where} as one for all parameters does: "
    if found.cause is _Cause.DRAWS:
        return f"{text}it draws random numbers one parameter after the other, and each stage would draw the same ones"
    if found.cause is _Cause.FAILS:
        return f"{text}it fails in stage {found.part}, where some of its groups may be empty ({found.error})"
    if found.cause is _Cause.CLIPS:
        return (
            f"{text}it updates {found.parameter} otherwise where gradients are large, as if it clipped the norm of all "
            "gradients that it sees"
        )
    return f"{text}what it does to {found.parameter} depends on the parameters beside it"


def _instead(found: _Difference) -> str:
    if found.cause is _Cause.CLIPS:
        return (
            "let FuncPipe clip, with clip_grad_norm=... (--set training.clip-grad-norm=NORM), and not the optimiser, "
            "or choose one that updates each parameter by itself"
        )
    return "choose one that updates each parameter by itself (SGD, Adam, AdamW, …)"


def check_sharding(
    factory: OptimizerFactory,
    shapes: Sequence[ParameterShape],
    stages: Sequence[Collection[str]],
    routes: Routes,
) -> None:
    """Raise PlanError unless the optimisers of `stages`, each given by the names of its parameters, can be divided over
    the replicas of the stage.
    """
    for shape in shapes:
        if shape.dtype.is_complex:
            raise PlanError(
                f"the optimiser cannot be divided over replicas where parameters are complex, as {shape.name} is; plan "
                "without shard_optimizer, or keep its real and imaginary parts in a parameter (torch.view_as_complex)"
            )
    if routes.ties:
        first, *others = routes.ties[0].stages
        raise PlanError(
            f"the optimiser cannot be divided over replicas where stages share parameters, as {first} and "
            f"{', '.join(map(str, others))} share {routes.ties[0].parameters[0]}; keep its layers together "
            "(--set plan.together=LAYER,LAYER), or plan without shard_optimizer"
        )
    found = _find_difference(factory, shapes, stages, cut=True)
    if found is not None:
        raise PlanError(
            f"the state of this optimiser cannot be divided over replicas: {_fact(found)}; choose one that updates "
            "every element by itself (SGD, Adam, AdamW, …, not fused), or a plan without shard_optimizer"
        )


def _fact(found: _Difference) -> str:
    if found.cause is _Cause.DRAWS:
        return f"{found.optimizer} draws random numbers, and each replica would draw the same ones"
    if found.cause is _Cause.FAILS:
        return f"{found.optimizer} fails on a part of a parameter ({found.error})"
    if found.cause is _Cause.STATE:
        return f"{found.optimizer} keeps something for a parameter that cannot be cut with it"
    return f"{found.optimizer} does not update {found.parameter}, cut in two, as it updates it whole"
