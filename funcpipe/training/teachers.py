"""Teachers: frozen parts of a model whose parameters average those of another part, as in BYOL, DINO and Mean Teacher.

After each step a teacher's parameters become `decay` of themselves and 1 - `decay` of the student's. Replicas have
equal students, so each updates its own teacher, and nothing is sent. Where the two are in different stages, that of the
teacher trains a copy of the student's parameters, as if they were tied (`model.graph.held`).
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from funcpipe.errors import InvalidValue
from funcpipe.model.graph.program import is_inside


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
        if not callable(self.decay) and not is_share(self.decay):
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


def is_share(value: object) -> bool:
    """Return True if `value` is a number from 0 to 1."""
    return isinstance(value, float | int) and 0 <= value <= 1
