"""The names of a model's tensor inputs, and the binding of call arguments to them."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.errors import DataError, ModelError
from funcpipe.model.graph.input_checks import InputChecks
from funcpipe.model.tensors import Tree, flatten


@dataclass(frozen=True)
class Signature:
    """How a model is called: its `forward`'s parameters, the tree of their values, and the names of the tensors.

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
