"""Averages over training steps: of a model's parameters (EMA, SWA), and of a part of it by another (teachers).

`EMA` and `SWA` average as `torch.optim.swa_utils.AveragedModel` does, beside the model. Each stage averages its own
parameters after each update, so no function needs to ask another. The average is part of the stage's state: checkpoints
hold it, and a run that is resumed goes on with the same bits.

Teachers are frozen parts of a model whose parameters average those of another part, as in BYOL, DINO and Mean Teacher.
After each step a teacher's parameters become `decay` of themselves and 1 - `decay` of the student's. Replicas have
equal students, so each updates its own teacher, and nothing is sent. Where the two are in different stages, that of the
teacher trains a copy of the student's parameters, as if they were tied (`model.graph.held`).
"""

import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_avg_fn

from funcpipe.core import checks
from funcpipe.core.texts import error_text
from funcpipe.errors import InputError, InvalidValue, ModelError
from funcpipe.model.graph.program import is_inside
from funcpipe.training.state import AVERAGE, AVERAGED, StageState, mismatch_is_corrupt, tensor_names, with_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class EMA:
    """The exponential moving average: after each step, `decay` of the average and 1 - `decay` of the parameters.

    It begins with the parameters after the first step. With `use_buffers`, buffers are averaged too.
    """

    decay: float = 0.999
    use_buffers: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.decay <= 1:
            raise InvalidValue("decay", self.decay, "must be between 0 and 1")

    def takes(self, steps_done: int) -> bool:
        """Return True: the parameters count as they are after any number of steps."""
        return True

    def mix(self, averaged: Sequence[Tensor], current: Sequence[Tensor], count: int) -> None:
        """Take `current` into `averaged`, in place."""
        mix = get_ema_multi_avg_fn(self.decay)  # type: ignore[no-untyped-call]
        for one, other in zip(averaged, current, strict=True):  # one by one, as `mix` takes tensors of one dtype only
            mix([one], [other], count)


@dataclass(frozen=True, slots=True, kw_only=True)
class SWA:
    """The plain average of the parameters after step `start_step`, counted from 1, and each `every_steps` steps later.

    With `use_buffers`, buffers are averaged too.
    """

    start_step: int
    every_steps: int = 1
    use_buffers: bool = False

    def __post_init__(self) -> None:
        checks.at_least("start_step", self.start_step, 1)
        checks.at_least("every_steps", self.every_steps, 1)

    def takes(self, steps_done: int) -> bool:
        """Return True if the parameters count as they are after so many steps."""
        return steps_done >= self.start_step and (steps_done - self.start_step) % self.every_steps == 0

    def mix(self, averaged: Sequence[Tensor], current: Sequence[Tensor], count: int) -> None:
        """Take `current` into `averaged`, the mean of `count` values so far, in place."""
        mean = get_swa_avg_fn()  # type: ignore[no-untyped-call]
        for one, other in zip(averaged, current, strict=True):
            one.copy_(mean(one, other, torch.tensor(count)))


class WeightAverage:
    """The average of one stage's parameters that training changes, and of its buffers if that is asked for."""

    def __init__(self, average: EMA | SWA, stage: nn.Module, teachers: Collection[nn.Parameter] = ()) -> None:
        """Besides those that are trained, the parameters of `teachers` change."""
        self._average = average
        self._stage = stage
        self._teachers = {id(parameter) for parameter in teachers}
        self._averaged: dict[str, Tensor] = {}
        self._count = 0

    @property
    def _current(self) -> dict[str, Tensor]:
        """The averaged tensors, as they are now: a forward may have put another tensor in the place of a buffer."""
        return {
            name: tensor
            for name, tensor in tensor_names(self._stage)[0].items()
            if (self._changes(tensor) if isinstance(tensor, nn.Parameter) else self._average.use_buffers)
        }

    def _changes(self, parameter: nn.Parameter) -> bool:
        return parameter.requires_grad or id(parameter) in self._teachers

    @torch.no_grad()
    def update(self, steps_done: int) -> None:
        """Take the parameters into the average, as they are after so many steps, if they count."""
        if not self._average.takes(steps_done):
            return
        if self._count == 0:
            self._averaged = {name: tensor.detach().clone() for name, tensor in self._current.items()}
        else:
            current = [tensor.detach() for tensor in self._current.values()]
            self._average.mix(list(self._averaged.values()), current, self._count)
        self._count += 1

    def added_to(self, state: StageState) -> StageState:
        """Return `state` with the average; its tensors are not copied."""
        tensors = {AVERAGED + name: tensor for name, tensor in self._averaged.items()}
        return with_settings(state, {AVERAGE: {"count": self._count}}, tensors)

    def restore(self, state: StageState) -> None:
        """Go back to the average in `state`. Raises CorruptMessage if it is not this stage's."""
        with mismatch_is_corrupt():
            saved: Mapping[str, Any] = state.settings.get(AVERAGE, {"count": 0})
            self._count = int(saved["count"])
            names = self._current if self._count else ()
            self._averaged = {name: state.tensors[AVERAGED + name].clone() for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """The module at the path `teacher` averages the one at `student`: after each step, `decay` of it and 1 - `decay` of
    the student. `decay` may be a function of the step, which counts from 0.

    Their parameters have the same names and shapes, and those of the teacher are frozen. Each keeps its own buffers.
    """

    student: str
    teacher: str
    decay: float | Callable[[int], float]

    def __post_init__(self) -> None:
        for field in ("student", "teacher"):
            path = getattr(self, field)
            if not isinstance(path, str) or not path:
                raise InvalidValue(field, path, "must be the path of a module in the model, such as 'teacher.backbone'")
        if is_inside(self.student, self.teacher) or is_inside(self.teacher, self.student):
            raise InvalidValue("teacher", self.teacher, f"must be beside its student {self.student!r}, not inside it")
        if not callable(self.decay) and not _is_share(self.decay):
            raise InvalidValue("decay", self.decay, "must be between 0 and 1, or a function of the step")

    def decay_after(self, step: int) -> float:
        """Return the decay after `step`."""
        return float(self.decay(step) if callable(self.decay) else self.decay)

    def student_of(self, names: Iterable[str]) -> dict[str, str]:
        """Return the teacher's parameters among `names`, each with the name of the student's."""
        return {name: self.student + name.removeprefix(self.teacher) for name in names if is_inside(name, self.teacher)}

    def __str__(self) -> str:
        return f"{self.teacher} of {self.student} by {'a function' if callable(self.decay) else self.decay}"


class TeacherUpdate:
    """The teachers that a module, the model or a stage of it, holds with their students."""

    def __init__(self, teachers: Sequence[Teacher], module: nn.Module) -> None:
        named = dict(module.named_parameters(remove_duplicate=False))
        self._parts = []
        for teacher in teachers:
            names = teacher.student_of(named)
            pairs = {id(named[one]): (named[one], named[other]) for one, other in names.items() if other in named}
            alone = [one for one in names if id(named[one]) not in pairs]
            assert not alone, f"{alone[0]} is held, and the parameter that it follows is not"
            self._parts.append((teacher, tuple(pairs.values())))

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """Those of the teachers."""
        return tuple(parameter for _, pairs in self._parts for parameter, _ in pairs)

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Update them after the optimiser has taken `step`, which counts from 0."""
        for teacher, pairs in self._parts:
            decay = teacher.decay_after(step)
            for parameter, student in pairs:
                parameter.mul_(decay).add_(student, alpha=1 - decay)


def as_teachers(given: object) -> tuple[Teacher, ...]:
    """Return `given`, a teacher or several, as a tuple. Raises InvalidValue unless no two of them share parameters."""
    found = (given,) if isinstance(given, Teacher) else tuple(given) if isinstance(given, list | tuple) else (None,)
    if not all(isinstance(one, Teacher) for one in found):
        raise InvalidValue("teachers", given, "must be one Teacher or several: Teacher(student=…, teacher=…, decay=…)")
    for one, other in itertools.permutations(found, 2):
        for field, path in (("teacher", other.teacher), ("student", other.student)):
            if is_inside(path, one.teacher) or is_inside(one.teacher, path):
                raise InvalidValue(
                    "teachers", one.teacher, f"must not share parameters with the {field} {path!r} of another Teacher"
                )
    return found


def _is_share(value: object) -> bool:
    """Return True if `value` is a number from 0 to 1."""
    return isinstance(value, float | int) and 0 <= value <= 1


_log = logging.getLogger(__name__)

_MOST, _AGAIN = 10_000, 10
"""For how many steps at most a decay that is a function is tried, and for how many a second time."""


def followed(teachers: Sequence[Teacher], model: nn.Module) -> dict[str, str]:
    """Return each parameter of the teachers in `model`, by its first name, and the student's that it follows.

    Raises ModelError unless the teachers can follow their students.
    """
    found: dict[str, str] = {}
    for teacher in teachers:
        own, others = (_parameters(model, path) for path in (teacher.teacher, teacher.student))
        _check_equal(teacher, own, others)
        for name, parameter in own.items():
            if parameter.requires_grad:
                raise ModelError(
                    f"{name} is trainable, so the optimiser would update it too; freeze the teacher before: "
                    f"model.get_submodule({teacher.teacher!r}).requires_grad_(False)"
                )
        found |= teacher.student_of(own)
    return found


def _parameters(model: nn.Module, path: str) -> dict[str, nn.Parameter]:
    """Return the parameters of the module at `path`, by their names in `model`."""
    try:
        module = model.get_submodule(path)
    except AttributeError as error:
        raise ModelError(
            f"{type(model).__name__} has no module {path!r} for a Teacher; named_modules() lists all paths"
        ) from error
    return {f"{path}.{name}": parameter for name, parameter in module.named_parameters()}


def _check_equal(teacher: Teacher, own: Mapping[str, nn.Parameter], others: Mapping[str, nn.Parameter]) -> None:
    """Raise ModelError unless teacher and student have the same parameters, each its own."""
    path_of = teacher.student_of(own)
    alone = [name for name, other in path_of.items() if other not in others]
    alone += [name for name in others if name not in path_of.values()]
    if alone or not own:
        raise ModelError(
            f"the teacher {teacher.teacher!r} and its student {teacher.student!r} must have the same parameters, and "
            f"{f'only one of them has {alone[0]}' if alone else 'they have none'}; give the paths of two equal modules"
        )
    for name, parameter in own.items():
        other = others[path_of[name]]
        if _form(parameter) != _form(other):
            raise ModelError(
                f"{name} has {_form(parameter)}, but {path_of[name]}, which it is to follow, {_form(other)}"
            )
        if parameter is other:
            raise ModelError(f"{name} and {path_of[name]} are one parameter; make the teacher by copy.deepcopy")


def _form(parameter: nn.Parameter) -> str:
    return "no shape yet" if is_lazy(parameter) else f"shape {list(parameter.shape)} of {parameter.dtype}"


def warn_of_copies(teachers: Sequence[Teacher], model: nn.Module) -> None:
    """Warn of modules that are frozen copies of trained ones, and no teachers: scripts update such, a run will not."""
    for path, original in _frozen_copies(model):
        if not any(is_inside(path, teacher.teacher) for teacher in teachers):
            _log.warning(
                "%s is a frozen copy of %s, and stays as it is while that is trained; if it is to follow, give "
                "teachers=Teacher(student=%r, teacher=%r, decay=…)",
                path,
                original,
                original,
                path,
            )


def _frozen_copies(model: nn.Module) -> Iterator[tuple[str, str]]:
    """The paths of modules whose parameters are all frozen and equal those of a module that is trained, and of that.

    Only the outermost; those of constants alone, such as a new LayerNorm, do not count.
    """
    if all(parameter.requires_grad for parameter in model.parameters()):
        return
    trained: dict[object, list[tuple[str, nn.Module]]] = defaultdict(list)
    frozen: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if any(parameter.requires_grad for parameter in module.parameters()):
            trained[_forms(module)].append((path, module))
        elif path and not any(is_inside(path, outer) for outer in frozen):
            frozen[path] = module
    for path, module in frozen.items():
        for original, other in trained.get(_forms(module), ()):
            if _are_equal(module, other):
                yield path, original
                break


def _are_equal(module: nn.Module, other: nn.Module) -> bool:
    """Return True if their parameters are equal, some with values that differ among each other."""
    pairs = [pair for pair in zip(module.parameters(), other.parameters(), strict=True) if not is_lazy(pair[0])]
    vary = any(bool((one != one.reshape(-1)[:1]).any()) for one, _ in pairs)
    return vary and all(torch.equal(one, two) for one, two in pairs)


def _forms(module: nn.Module) -> tuple[object, ...]:
    return type(module), *((name, _form(parameter)) for name, parameter in module.named_parameters())


def check_decays(teachers: Sequence[Teacher], first: int, stop: int) -> None:
    """Raise InputError unless each decay is a number for every step from `first` up to `stop`, and always the same."""
    for teacher in teachers:
        if callable(teacher.decay):
            steps = range(first, min(stop, first + _MOST))
            found = [_tried(teacher, step, stop) for step in steps]
            if any(_tried(teacher, step, stop) != decay for step, decay in zip(steps[:_AGAIN], found, strict=False)):
                raise InputError(
                    f"the decay of the teacher {teacher.teacher!r} is another one when it is asked again; let it "
                    "depend on nothing but the step, as functions are replaced and each calls it"
                )


def _tried(teacher: Teacher, step: int, steps: int) -> float:
    fact = f"the decay of the teacher {teacher.teacher!r} after step {step} of {steps}, counted from 0,"
    try:
        decay = teacher.decay_after(step)
    except Exception as error:  # whatever a user's function raises
        raise InputError(
            f"{fact} cannot be found: {error_text(error)}; give a number, or a function of the step"
        ) from error
    if not _is_share(decay):
        raise InputError(f"{fact} is {decay}; it must be between 0 and 1")
    return decay
