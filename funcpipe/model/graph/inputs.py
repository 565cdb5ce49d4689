"""A model's inputs: the names of its tensors, what must hold of them in every micro-batch, and batches of them.

Where the first dimension of the inputs is the batch, a few samples of it are a batch too. Graphs in one tensor, packed
sequences and sequences that begin with time cannot be cut like that: only the user's collate function makes batches.
"""

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from funcpipe.errors import DataError, ModelError
from funcpipe.model.tensors import Tree, flatten


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


Sizes = Mapping[str, Sequence[int]]
"""The sizes of a model's inputs."""


def needed_guards(guards: Sequence[str], compared: Sequence[Sizes]) -> tuple[str, ...]:
    """Those of a tracer's `guards` that inputs must meet for its graph to be right.

    Tracers take for granted that nothing has the size 1, as it would be broadcast. That a graph agrees with the model
    all the same is known where both were `compared` for inputs for which such a guard does not hold.
    """
    of_ones = [guard for guard in guards if guard.endswith((" != 1", " >= 2"))]
    known = {guard for guard in of_ones if not all(holds(guard, sizes) for sizes in compared)}
    return tuple(guard for guard in guards if guard not in known)


def holds(guard: str, sizes: Sizes) -> bool:
    """Return whether inputs of these `sizes` meet a condition on `sizes[input][dimension]`, in Python."""
    try:
        return bool(eval(_compiled(guard), {"sizes": sizes, "math": math, "torch": torch}))
    except ZeroDivisionError:
        return False


@lru_cache(maxsize=256)  # environments are used again, for other models too
def _compiled(condition: str) -> CodeType:
    return compile(condition, "<guard>", "eval")


@dataclass(frozen=True)
class Signature:
    """The way to call a model: its `forward`'s parameters, the tree of their values, and the names of the tensors.

    `names` has an entry for each leaf of the arguments: a name for a tensor; None for anything else, which is a
    constant of the traced model, kept in `constants`. `checks` says which inputs the traced model is right for.
    """

    forward: inspect.Signature
    tree: Tree
    names: tuple[str | None, ...]
    constants: tuple[Any, ...]
    checks: InputChecks | None = None

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of the tensor inputs, in order."""
        return tuple(name for name in self.names if name is not None)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors of a call by input name; raises DataError unless the traced model is right for them."""
        try:
            bound = self.forward.bind(*args, **kwargs)
        except TypeError as error:
            raise DataError(f"the model cannot be called with these inputs: {error}") from error
        leaves, tree = flatten(dict(bound.arguments))
        if tree.paths("") != self.tree.paths(""):
            expected, found = self.tree.paths("inputs"), tree.paths("inputs")
            raise DataError(
                f"the model was traced with {_listed(expected)}, but got {_listed(found)}; give every micro-batch as "
                "many tensors: pad its samples, or put them into one tensor"
            )
        for path, name, constant, leaf in zip(tree.paths(""), self.names, self.constants, leaves, strict=True):
            if name is None and leaf is not constant and leaf != constant:
                raise DataError(
                    f"the input {path[1:]} was {constant!r} when the model was traced, but is {leaf!r} now; give what "
                    "changes from one micro-batch to the next as a tensor"
                )
            if name is not None and not isinstance(leaf, Tensor):
                raise DataError(f"the input {path[1:]} must be a tensor, got {type(leaf).__name__}")
        tensors = {name: leaf for name, leaf in zip(self.names, leaves, strict=True) if name is not None}
        if self.checks is not None:
            self.checks.check(tensors)
        return tensors

    def arguments(self, tensors: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inverse of `bind`: the call's arguments, with `tensors` for the inputs."""
        leaves: Iterator[Any] = iter(
            [
                constant if name is None else tensors[name]
                for name, constant in zip(self.names, self.constants, strict=True)
            ]
        )
        bound = inspect.BoundArguments(self.forward, self.tree.unflatten(leaves))
        return bound.args, bound.kwargs

    def call(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> Any:
        """Call `model` with copies of `inputs`, which its code may write into."""
        args, kwargs = self.arguments({name: tensor.clone() for name, tensor in inputs.items()})
        return model(*args, **kwargs)


def signature_of(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Signature:
    """The signature of `model` when called with `args` and `kwargs`; raises ModelError if it cannot be called like
    that, DataError for nested tensors.
    """
    forward = inspect.signature(model.forward)
    unannotated = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in forward.parameters.values()]
    forward = inspect.Signature(unannotated)
    try:
        bound = forward.bind(*args, **kwargs)
    except TypeError as error:
        given = [*(f"input {number}" for number in range(len(args))), *map(str, kwargs)]
        raise ModelError(
            f"{type(model).__name__} cannot be called with the sample: {error}; the sample holds {', '.join(given)}, "
            f"and forward takes {forward}. A sample of a dataset is a tuple of the inputs and, last, the target, or a "
            "dictionary of all arguments by name, alone or in a tuple with the target"
        ) from error
    leaves, tree = flatten(dict(bound.arguments))
    paths = [path[1:] for path in tree.paths("")]
    for path, leaf in zip(paths, leaves, strict=True):
        if isinstance(leaf, Tensor) and leaf.is_nested:
            raise DataError(
                f"the input {path} is a nested tensor (torch.nested), whose layers cannot be sent from one function to "
                "another; give a PackedSequence (torch.nn.utils.rnn.pack_sequence), or pad the samples to one length "
                "(torch.nn.utils.rnn.pad_sequence), in the collate_fn"
            )
    names = tuple(path if isinstance(leaf, Tensor) else None for path, leaf in zip(paths, leaves, strict=True))
    if not any(names):
        raise ModelError(
            f"the sample for {type(model).__name__} contains no tensor; pass an example of the model's inputs"
        )
    constants = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return Signature(forward, tree, names, constants)


def batch_of(tensors: Mapping[str, Tensor]) -> int | None:
    """The batch size of a call: the length of the first input that has dimensions; None if there is none."""
    return next((tensor.size(0) for tensor in tensors.values() if tensor.dim() > 0), None)


def resized(tensors: Mapping[str, Tensor], batch: int, *, offset: int = 0) -> dict[str, Tensor]:
    """`tensors` with `batch` samples, cut or repeated along the batch dimension, beginning at `offset`."""
    size = batch_of(tensors)
    if size is None or size == 0:
        return dict(tensors)
    rows = (torch.arange(batch) + offset) % size
    return {name: t[rows] if t.dim() > 0 and t.size(0) == size else t for name, t in tensors.items()}


def _listed(paths: tuple[str, ...]) -> str:
    return ", ".join(paths) or "nothing"


class Collated(Protocol):
    """Samples at hand, of which a collate function makes batches; the user's own batch has so many `samples`."""

    @property
    def samples(self) -> int:
        """The number of samples in the user's own batch."""

    def arguments(self, samples: int, offset: int) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """The arguments of a call with so many samples, which begin at `offset` among those at hand."""


class InputBatches(Protocol):
    """Makes inputs of a model, by name; the user's sample has so many `samples`."""

    @property
    def samples(self) -> int:
        """The number of samples in the user's own batch."""

    def batch(self, samples: int, offset: int = 0) -> dict[str, Tensor]:
        """The inputs for so many samples, beginning at `offset`."""

    def others(self, inputs: Mapping[str, Tensor], samples: int) -> dict[str, Tensor]:
        """Inputs for as many samples as `inputs`, but not the same ones."""


@dataclass(frozen=True)
class CutBatches:
    """Rows of the user's `inputs`, cut or repeated along the first dimension."""

    inputs: Mapping[str, Tensor]

    @property
    def samples(self) -> int:
        """The size of the first dimension."""
        return batch_of(self.inputs) or 1

    def batch(self, samples: int, offset: int = 0) -> dict[str, Tensor]:
        """So many rows, beginning at `offset`."""
        return resized(self.inputs, samples, offset=offset)

    def others(self, inputs: Mapping[str, Tensor], samples: int) -> dict[str, Tensor]:
        """The same rows in another order."""
        return resized(inputs, samples, offset=1)


@dataclass(frozen=True)
class CollatedBatches:
    """Batches that the user's collate function makes."""

    signature: Signature
    collated: Collated

    @property
    def samples(self) -> int:
        """The number of samples that were collated."""
        return self.collated.samples

    def batch(self, samples: int, offset: int = 0) -> dict[str, Tensor]:
        """So many samples, collated; raises DataError for inputs that the model was not traced for."""
        return self.signature.bind(*self.collated.arguments(samples, offset))

    def others(self, inputs: Mapping[str, Tensor], samples: int) -> dict[str, Tensor]:
        """Other samples, collated."""
        return self.batch(samples, offset=samples)
