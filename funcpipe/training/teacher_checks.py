"""Checks of teachers before a run: that they can follow their students, and by how much in each step."""

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from funcpipe.core.texts import error_text
from funcpipe.errors import InputError, ModelError
from funcpipe.model.graph.program import is_inside
from funcpipe.training.teachers import Teacher, is_share

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
    if not is_share(decay):
        raise InputError(f"{fact} is {decay}; it must be between 0 and 1")
    return decay
