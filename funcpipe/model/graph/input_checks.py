"""What a traced model takes for granted about its inputs, checked on every micro-batch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType

import torch
from torch import Tensor

from funcpipe.errors import DataError

Sizes = Mapping[str, Sequence[int]]
"""The sizes of a model's inputs."""


def needed_guards(guards: Sequence[str], compared: Sequence[Sizes]) -> tuple[str, ...]:
    """Those of a tracer's `guards` that inputs must meet for its graph to be right.

    Tracers take for granted that nothing has the size 1, as it would be broadcast. That a graph agrees with the model
    all the same is known where both were `compared` for inputs for which such a guard does not hold.
    """
    known = {guard for guard in guards if is_of_ones(guard) and not all(holds(guard, sizes) for sizes in compared)}
    return tuple(guard for guard in guards if guard not in known)


def is_of_ones(guard: str) -> bool:
    """Whether a guard only says that something has not the size 1."""
    return guard.endswith((" != 1", " >= 2"))


def holds(guard: str, sizes: Sizes) -> bool:
    """Whether inputs of these `sizes` meet a condition on `sizes[input][dimension]`, in Python."""
    try:
        return bool(eval(_compiled(guard), {"sizes": sizes, "math": math, "torch": torch}))
    except ZeroDivisionError:
        return False


@dataclass(frozen=True)
class InputChecks:
    """The inputs that a traced model is right for.

    `sizes` says of each dimension of each input which size it must have: a number, that of all others with the same
    name, or None for any. `guards` are conditions on the sizes. `shapes` are those of the user's sample.
    """

    dtypes: Mapping[str, torch.dtype]
    shapes: Mapping[str, tuple[int, ...]]
    sizes: Mapping[str, tuple[int | str | None, ...]]
    guards: tuple[str, ...] = ()

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise DataError unless the model is right for inputs like `tensors`."""
        known: dict[str, int] = {}
        for name, sizes in self.sizes.items():
            tensor = tensors[name]
            if tensor.dtype != self.dtypes[name]:
                raise DataError(
                    f"the input {name} was {self.dtypes[name]} when the model was traced, but is {tensor.dtype} now; "
                    "convert it in the dataset"
                )
            shape = tensor.shape
            if len(shape) != len(sizes):
                raise DataError(self._text(tensors, name, f"must have {len(sizes)} dimensions"))
            for i, size in enumerate(sizes):
                if size is None:
                    continue
                expected = size if isinstance(size, int) else known.setdefault(size, shape[i])
                if shape[i] != expected:
                    raise DataError(self._text(tensors, name, f"must have {expected} in dimension {i}"))
        if self.guards:
            self._check_guards(tensors)

    def _check_guards(self, tensors: Mapping[str, Tensor]) -> None:
        sizes = {name: tensor.shape for name, tensor in tensors.items()}
        for guard in self.guards:
            if not holds(guard, sizes):
                raise DataError(self._text(tensors, None, f"must satisfy {guard}"))

    def _text(self, tensors: Mapping[str, Tensor], name: str | None, rule: str) -> str:
        names = [name] if name else list(tensors)
        found = ", ".join(f"{one} {tuple(tensors[one].shape)}" for one in names)
        traced = ", ".join(f"{one} {self.shapes[one]}" for one in names)
        return (
            f"the traced model is not right for inputs of the shapes {found}: it was traced with {traced}, and "
            f"{name or 'its inputs'} {rule}. Pad all samples to one shape, or train on samples of each shape by "
            "themselves"
        )


@lru_cache(maxsize=256)  # environments are used again, for other models too
def _compiled(condition: str) -> CodeType:
    return compile(condition, "<guard>", "eval")
