"""Teachers: frozen parts of a model whose parameters average those of another part, as in BYOL, DINO and Mean Teacher.

After each step a teacher's parameters become `decay` of themselves and 1 - `decay` of the student's. Replicas have
equal students, so each updates its own teacher, and nothing is sent. Where the two are in different stages, that of the
teacher trains a copy of the student's parameters, as if they were tied (`model.graph.held`).
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from funcpipe.errors import InputError, InvalidValue, ModelError
from funcpipe.model.graph.program import is_inside

_MOST, _AGAIN = 10_000, 10
"""For how many steps at most a decay that is a function is tried, and for how many a second time."""


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
        """The decay after `step`."""
        return float(self.decay(step) if callable(self.decay) else self.decay)

    def student_of(self, names: Iterable[str]) -> dict[str, str]:
        """The teacher's parameters among `names`, each with the name of the student's."""
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
    """`given`, a teacher or several, as a tuple. Raises InvalidValue unless no two of them share parameters."""
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


def followed(teachers: Sequence[Teacher], model: nn.Module) -> dict[str, str]:
    """Each parameter of the teachers in `model`, by its first name, and the student's that it follows.

    Raises ModelError unless the teachers can follow their students.
    """
    found: dict[str, str] = {}
    for teacher in teachers:
        own, others = (_parameters(model, path) for path in (teacher.teacher, teacher.student))
        _check_alike(teacher, own, others)
        for name, parameter in own.items():
            if parameter.requires_grad:
                raise ModelError(
                    f"{name} is trainable, so the optimiser would update it too; freeze the teacher before: "
                    f"model.get_submodule({teacher.teacher!r}).requires_grad_(False)"
                )
        found |= teacher.student_of(own)
    return found


def _parameters(model: nn.Module, path: str) -> dict[str, nn.Parameter]:
    """The parameters of the module at `path`, by their names in `model`."""
    try:
        module = model.get_submodule(path)
    except AttributeError as error:
        raise ModelError(
            f"{type(model).__name__} has no module {path!r} for a Teacher; named_modules() lists all paths"
        ) from error
    return {f"{path}.{name}": parameter for name, parameter in module.named_parameters()}


def _check_alike(teacher: Teacher, own: Mapping[str, nn.Parameter], others: Mapping[str, nn.Parameter]) -> None:
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
            f"{fact} cannot be found: {type(error).__name__}: {error}; give a number, or a function of the step"
        ) from error
    if not _is_share(decay):
        raise InputError(f"{fact} is {decay}; it must be between 0 and 1")
    return decay


def _is_share(value: object) -> bool:
    return isinstance(value, float | int) and 0 <= value <= 1
