"""Gradient caching: the loss of a whole global batch, of which a stage computes one micro-batch at a time.

After GradCache (Gao et al., RepL4NLP 2021), over replicas: outputs of all micro-batches are kept, and exchanged by the
replicas of the last stage; each lays them side by side, as one forward of the whole batch would have made them, and
computes the loss of all. Its gradient by the outputs of a micro-batch is where the backward of that one begins.

    keep(m) for its own m → message() → receive() from the others → loss() → gradients(m) for its own m

Replicas compute the same loss; only the one with the first micro-batch adds to the gradients of the loss's parameters.

By hand: micro-batches of 2 and 1 samples have the outputs [[1], [2]] and [[3]], along whose first dimension samples
lie, and both the same temperature, 0.5. Side by side these are [[1], [2], [3]] and 0.5.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from funcpipe.errors import DataError
from funcpipe.model.tensors import Tree, flatten
from funcpipe.training.batches import Step
from funcpipe.training.losses import LossFunction, seed_loss

WAY_OUT = (
    "coupled='cache' needs outputs and targets that are tensors [samples, …] of one shape, or the same in all "
    "micro-batches"
)

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
"""Values besides tensors that may be the same in all micro-batches."""


@dataclass(frozen=True)
class BatchLayout:
    """The dimension along which samples lie in each leaf of (output, target); None where they do not, as all
    micro-batches have the same.
    """

    dims: tuple[int | None, ...]

    def join(self, values: Sequence[tuple[Any, Any]], samples: Sequence[int]) -> tuple[Any, Any]:
        """Return the output and the target of a batch, of those of its micro-batches, which have so many `samples`.

        All tensors are copies, into which a loss may write. Raises DataError for what cannot be laid side by side.
        """
        flat = [flatten(value) for value in values]
        paths = flat[0][1].paths("")
        for _, tree in flat:
            if tree.paths("") != paths or len(paths) != len(self.dims):
                raise DataError(
                    f"the outputs or targets of micro-batches differ in their parts: {_listed(paths)} and "
                    f"{_listed(tree.paths(''))}; {WAY_OUT}"
                )
        leaves = [
            _joined(name_of(path), [parts[i] for parts, _ in flat], samples, self.dims[i])
            for i, path in enumerate(paths)
        ]
        output, target = flat[0][1].unflatten(iter(leaves))
        return output, target


def first_dims(output: Any, target: Any) -> BatchLayout:
    """Return the layout if samples lie along the first dimension of all tensors that have one."""
    leaves, _ = flatten((output, target))
    return BatchLayout(tuple(0 if isinstance(leaf, Tensor) and leaf.dim() else None for leaf in leaves))


def name_of(path: str) -> str:
    """Return the leaf at a path in (output, target) in words: `.0.logits` is output.logits."""
    place, _, rest = path.removeprefix(".").partition(".")
    return ("output", "target")[int(place)] + (f".{rest}" if rest else "")


def described(leaf: Any) -> str:
    """Return a tensor by its shape; anything else by its type."""
    return f"a tensor {list(leaf.shape)}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"


def _joined(name: str, parts: Sequence[Any], samples: Sequence[int], dim: int | None) -> Any:
    if dim is None:
        for part, count in zip(parts, samples, strict=True):
            if not _equal(parts[0], part):
                raise _apart(name, (parts[0], samples[0]), (part, count))
        return parts[0].clone() if isinstance(parts[0], Tensor) else parts[0]
    for part, count in zip(parts, samples, strict=True):
        if not isinstance(part, Tensor) or _form(part, dim, count) != _form(parts[0], dim, samples[0]):
            raise _apart(name, (parts[0], samples[0]), (part, count))
    return torch.cat(list(parts), dim)


def _form(part: Tensor, dim: int, samples: int) -> Any:
    """The properties that parts must share to lie side by side: among them, as many whole rows for each sample."""
    if dim >= part.dim() or part.size(dim) % samples:
        return None, tuple(part.shape), samples
    return part.dtype, part.size(dim) // samples, tuple(size for i, size in enumerate(part.shape) if i != dim)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype is other.dtype and one.shape == other.shape and torch.equal(one, other)
    return one is other or (isinstance(one, _PLAIN) and type(one) is type(other) and repr(one) == repr(other))


def _apart(name: str, one: tuple[Any, int], other: tuple[Any, int]) -> DataError:
    return DataError(
        f"{name} is {described(one[0])} and {described(other[0])} for {one[1]} and {other[1]} samples, which cannot be "
        f"laid side by side: {WAY_OUT}"
    )


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(map(name_of, paths))


_REST = "rest"


class OutputCache:
    """The outputs of a step, and their gradients, that the last stage keeps until the next one begins.

    Messages may be written after the backwards that they do not wait for have begun, so nothing kept is changed.
    """

    def __init__(self, loss: LossFunction, layout: BatchLayout | None, *, seed: int) -> None:
        """Without a `layout`, samples lie along the first dimension."""
        self._loss = loss
        self._layout = layout
        self._seed = seed
        self._own: frozenset[int] = frozenset()
        self._kept: dict[int, list[Any]] = {}
        self._tree: Tree | None = None
        self._outputs = 0
        self._gradients: dict[int, list[Tensor | None]] = {}

    def begin_step(self, step: Step, own: Iterable[int]) -> None:
        """Start a step, of which this replica computes the micro-batches `own`."""
        self._step = step
        self._own = frozenset(own)
        self._kept, self._gradients = {}, {}

    def keep(self, micro_batch: int, output: Any, target: Any) -> None:
        """Keep what the forward of one of its own micro-batches has made; when that is computed again, nothing."""
        if micro_batch not in self._kept:
            leaves, self._tree = flatten((output, target))
            self._outputs = len(flatten(output)[0])
            self._kept[micro_batch] = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def message(self) -> dict[str, Tensor]:
        """Return its own outputs and targets, for the other replicas."""
        tensors = {_REST: torch.frombuffer(bytearray(self._rest().encode()), dtype=torch.uint8)}
        for m in sorted(self._own):
            tensors |= {f"{m}.{i}": leaf for i, leaf in enumerate(self._kept[m]) if isinstance(leaf, Tensor)}
        return tensors

    def receive(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep the outputs and targets in a message, another replica's or one that an earlier attempt has put.

        Raises DataError if what is no tensor differs from its own.
        """
        theirs = bytes(tensors[_REST].tolist()).decode()
        if theirs != self._rest():
            raise DataError(f"micro-batches of two replicas have {theirs} and {self._rest()} in common; {WAY_OUT}")
        example = self._kept[min(self._own)]
        received: dict[int, list[Any]] = {}
        for name, tensor in tensors.items():
            if name != _REST:
                m, i = map(int, name.split("."))
                received.setdefault(m, list(example))[i] = tensor
        self._kept |= received

    def loss(self, factor: Callable[[float], float]) -> float:
        """The loss of the step; `gradients` has its gradients from now on, times what `factor` says for this loss.

        Raises DataError for outputs that cannot be laid side by side, or a loss that is not one number.
        """
        assert self._tree is not None, "outputs are kept before their loss is computed"
        parts = [self._leaves(m) for m in range(len(self._step.micro_batches))]
        values = [self._tree.unflatten(iter(leaves)) for leaves in parts]
        layout = self._layout or first_dims(*values[0])
        output, target = layout.join(values, [len(indices) for indices in self._step.micro_batches])
        seed_loss(self._seed, self._step.number, 0)
        loss = self._loss(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise DataError("the loss function must return one number for the whole batch")
        own = [leaf for m in self._own for leaf in parts[m] if isinstance(leaf, Tensor) and leaf.requires_grad]
        trains = 0 in self._own
        if loss.requires_grad and (own or trains):
            seed = torch.full_like(loss, factor(loss.item()))
            torch.autograd.backward(loss, seed, inputs=None if trains else own)
        self._gradients = {
            m: [leaf.grad if isinstance(leaf, Tensor) else None for leaf in parts[m][: self._outputs]]
            for m in self._own
        }
        return loss.item()

    def gradients(self, micro_batch: int) -> list[Tensor | None]:
        """Return the gradients by the leaves of one of its own outputs; None where the loss does not depend on one."""
        return self._gradients.pop(micro_batch)

    def _leaves(self, micro_batch: int) -> list[Any]:
        """Return its own outputs as leaves of which gradients are found; targets, and others' outputs, as they are."""
        leaves = self._kept[micro_batch]
        if micro_batch not in self._own:
            return leaves
        return [_with_gradient(leaf) if i < self._outputs else leaf for i, leaf in enumerate(leaves)]

    def _rest(self) -> str:
        """Return all that is no tensor in its own micro-batches, as text; raises DataError if they differ in it."""
        assert self._tree is not None, "outputs are kept before they are sent"
        names = [name_of(path) for path in self._tree.paths("")]
        found = {
            ", ".join(f"{name}={_text(name, leaf)}" for name, leaf in zip(names, self._kept[m], strict=True))
            for m in self._own
        }
        if len(found) > 1:
            raise DataError(f"micro-batches have {' and '.join(sorted(found))} in common; {WAY_OUT}")
        return found.pop()


def _with_gradient(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    own = leaf.detach()
    return own.requires_grad_() if own.is_floating_point() or own.is_complex() else own


def _text(name: str, leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return "tensor"
    if not isinstance(leaf, _PLAIN):
        raise DataError(f"{name} is {described(leaf)}, which cannot be laid side by side: {WAY_OUT}")
    return repr(leaf)
