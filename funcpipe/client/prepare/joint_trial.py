"""Outputs and targets of micro-batches, laid side by side, must be those of a whole batch: tried before a run.

Some samples run together, as they do in one process, and in two parts, as in functions. The model is in training mode,
but without dropout, and with BatchNorm's running statistics, so that it should make the same of a sample in either.

Where samples lie is found by comparing batches of two sizes. A dimension that grows with the batch is one along which
they lie; a matrix of all samples with all has two. A list with one item for each sample is cut as such.
"""

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.client.prepare.data import SpreadSamples
from funcpipe.errors import DataError
from funcpipe.model.draws import generator_states
from funcpipe.model.graph.isolation import preserve_state
from funcpipe.model.graph.modes import training_mode
from funcpipe.model.graph.program import autocast_to
from funcpipe.model.graph.user_code import source_location
from funcpipe.model.tensors import Tree, copied, flatten
from funcpipe.training.data import LoadedBatch
from funcpipe.training.output_cache import WAY_OUT, BatchLayout, described, first_dims, name_of
from funcpipe.training.recipe import Recipe

_BY_ITEMS = (-1,)
"""The mark of a leaf that is a list with an item for each sample, in place of dimensions."""


@dataclass(frozen=True, kw_only=True)
class SampleRows:
    """A nested value of so many `samples`; `dims` are the dimensions along which they lie in each of its leaves.

    `varies` says whether a leaf along which they do not lie has another value in the other batch.
    """

    leaves: tuple[Any, ...]
    tree: Tree
    dims: tuple[tuple[int, ...], ...]
    samples: int
    varies: bool

    def take(self, samples: Sequence[int]) -> Any:
        """The same of some of the samples, of each as often as it is named; a copy, which may be changed."""
        pairs = zip(self.leaves, self.dims, strict=True)
        return self.tree.unflatten(iter([self._taken(leaf, dims, samples) for leaf, dims in pairs]))

    def of(self, leaves: Sequence[Any]) -> "SampleRows":
        """The same with other leaves."""
        return SampleRows(
            leaves=tuple(leaves), tree=self.tree, dims=self.dims, samples=self.samples, varies=self.varies
        )

    @property
    def form(self) -> tuple[Any, ...]:
        """The form that values must share to replace each other, sample by sample."""
        return (self.dims, *(_form(leaf, dims) for leaf, dims in zip(self.leaves, self.dims, strict=True)))

    def _taken(self, leaf: Any, dims: tuple[int, ...], samples: Sequence[int]) -> Any:
        if dims == _BY_ITEMS:
            return [leaf[i] for i in samples]
        if not isinstance(leaf, Tensor):
            return leaf
        taken = leaf.clone()
        for dim in dims:
            each = leaf.size(dim) // self.samples
            numbers = torch.tensor(samples)[:, None] * each + torch.arange(each)
            taken = taken.index_select(dim, numbers.flatten())
        return taken


def sample_rows(value: Any, samples: int, other: Any, other_samples: int) -> SampleRows | None:
    """The places of samples in `value`, which is like `other` for another number of them; None if that is not clear."""
    for are_items in (False, True):
        leaves, tree = flatten(value, opaque=_list_of(samples) if are_items else _nothing)
        others, other_tree = flatten(other, opaque=_list_of(other_samples) if are_items else _nothing)
        if tree.paths("") == other_tree.paths(""):
            pairs = list(zip(leaves, others, strict=True))
            found = [_row_dims(a, b, samples, other_samples) for a, b in pairs]
            dims = tuple(one for one in found if one is not None)
            if len(dims) < len(found):
                return None
            varies = any(not one and not _equal(a, b) for one, (a, b) in zip(dims, pairs, strict=True))
            return SampleRows(leaves=tuple(leaves), tree=tree, dims=dims, samples=samples, varies=varies)
    return None


def grown_dims(a: Tensor, b: Tensor, samples: int, other_samples: int) -> tuple[int, ...]:
    """The dimensions of `a` that are to those of `b` as `samples` are to `other_samples`."""
    sizes = enumerate(zip(a.shape, b.shape, strict=False))
    return tuple(dim for dim, (m, n) in sizes if m != n and m * other_samples == n * samples and not m % samples)


def _row_dims(a: Any, b: Any, samples: int, other_samples: int) -> tuple[int, ...] | None:
    if isinstance(a, list) and isinstance(b, list):
        return _BY_ITEMS
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return ()
    if a.dim() != b.dim():
        return None
    grown = grown_dims(a, b, samples, other_samples)
    return grown if grown or a.shape == b.shape else None


def _form(leaf: Any, dims: tuple[int, ...]) -> Any:
    if not isinstance(leaf, Tensor):
        return type(leaf)
    return leaf.dtype, tuple(size for dim, size in enumerate(leaf.shape) if dim not in dims)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    plain = (str, bytes, int, float, complex)
    return bool(operator.eq(a, b)) if isinstance(a, plain) and isinstance(b, plain) else True


def _list_of(count: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and len(value) == count


def _nothing(value: Any) -> bool:
    return False


_MOST = 32
"""The number of samples that the loss is rehearsed with, or two micro-batches if these are more."""

_ROUNDING = 1e-3
"""The share by which an output may differ: a model's sums depend on the size of the batch."""


@dataclass(frozen=True, kw_only=True)
class JointTrial:
    """Some samples of the dataset, and how outputs lie side by side; None if there are too few samples to see it."""

    samples: SpreadSamples
    layout: BatchLayout | None

    @classmethod
    def of(cls, model: nn.Module, recipe: Recipe, samples: SpreadSamples) -> "JointTrial":
        """Find out how outputs and targets lie. Raises DataError if a whole batch cannot be made of them."""
        half = min(samples.micro_batch, len(samples.indices) // 2)
        if not half:
            return cls(samples=samples, layout=None)
        indices = samples.unlike(2 * half)
        with preserve_state(model):
            before = generator_states()
            batches = [samples.load(part) for part in (indices, indices[:half], indices[half:])]
            drawn = {1} if generator_states() != before else set()
            before = generator_states()
            with training_quietly(model):
                whole, *parts = [(_output(model, recipe, batch), batch.target) for batch in batches]
            drawn |= {0} if generator_states() != before or _depends_on_batches(model) else set()
        layout, tolerance = BatchLayout(tuple(_dims(whole, parts[0], half))), 4 * recipe.precision.rounding
        with torch.no_grad():
            joined = layout.join(parts, [half, half])
            _check_same(whole, joined, half, but=drawn, tolerance=max(_ROUNDING, tolerance))
        return cls(samples=samples, layout=layout)

    def whole(self, model: nn.Module, recipe: Recipe, batch: LoadedBatch, output: Any) -> tuple[Any, Any]:
        """The output and the target of a batch of which `batch`, the first samples of the dataset, is a micro-batch
        with this `output`; the others have no gradients.
        """
        own = self.samples.micro_batch
        count = min(self.samples.global_batch, max(_MOST, 2 * own))
        others = [index for index in self.samples.indices if index >= own][: count - own]
        values, sizes = [(output, batch.target)], [own]
        for first in range(0, len(others), own):
            part = others[first : first + own]
            loaded = self.samples.load(part)
            values.append((_output(model, recipe, loaded), loaded.target))
            sizes.append(len(part))
        return (self.layout or first_dims(*values[0])).join(values, sizes)


@contextlib.contextmanager
def training_quietly(model: nn.Module) -> Iterator[None]:
    """Put the model in training mode, but for modules that draw random numbers or read the statistics of the batch."""
    quiet = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd)
    with training_mode(model):
        for module in model.modules():
            if isinstance(module, quiet):
                module.eval()
        yield


def _output(model: nn.Module, recipe: Recipe, batch: LoadedBatch) -> Any:
    try:
        with torch.no_grad(), autocast_to(recipe.precision):
            return model(*copied(batch.args), **copied(dict(batch.kwargs)))
    except Exception as error:
        raise DataError(
            f"the model fails on samples of several micro-batches together, as one process runs it for a loss of the "
            f"whole batch: {source_location(model, error)[1]}"
        ) from error


def _depends_on_batches(model: nn.Module) -> bool:
    """True if a BatchNorm has no running statistics to take in place of the batch's."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    return any(norm.running_mean is None for norm in norms)


def _dims(whole: Any, part: Any, half: int) -> Iterator[int | None]:
    """The dimension of each leaf that is twice as long for twice as many samples."""
    (leaves, tree), (others, other_tree) = flatten(whole), flatten(part)
    if tree.paths("") != other_tree.paths(""):
        raise DataError(f"outputs or targets of {2 * half} and of {half} samples differ in their parts; {WAY_OUT}")
    for path, leaf, other in zip(tree.paths(""), leaves, others, strict=True):
        if not isinstance(leaf, Tensor) or not isinstance(other, Tensor):
            yield None
            continue
        grown = grown_dims(leaf, other, 2 * half, half) if leaf.dim() == other.dim() else ()
        if len(grown) > 1 or (not grown and leaf.shape != other.shape):
            raise DataError(
                f"{name_of(path)} is {described(other)} for {half} samples and {described(leaf)} for {2 * half}, so "
                f"that those of micro-batches cannot be laid side by side: {WAY_OUT}"
            )
        yield grown[0] if grown else None


def _check_same(whole: Any, joined: Any, half: int, *, but: set[int], tolerance: float) -> None:
    """Raise DataError if the `whole` is something else than what was `joined`; values are compared `but` of outputs (0)
    or targets (1) in which something was drawn.
    """
    leaves, tree = flatten(whole)
    for path, leaf, other in zip(tree.paths(""), leaves, flatten(joined)[0], strict=True):
        place = ("0", "1").index(path.split(".")[1])
        if isinstance(leaf, Tensor) and isinstance(other, Tensor):
            apart = 1.0 if leaf.shape != other.shape else 0.0 if place in but else _apart(leaf, other)
        else:
            apart = float(repr(leaf) != repr(other))
        if apart > (0.0 if place else tolerance):
            why = (
                "the collate function makes something else of whole batches; let the loss make it instead"
                if place
                else "the model's forward makes something else of samples that run together; let the loss do that "
                "instead, or give coupled='accumulate'"
            )
            raise DataError(
                f"{name_of(path)} of {2 * half} samples is not what two parts of {half} make, side by side (off by "
                f"{apart:.2g} of itself), so that coupled='cache' would not train as one process does: {why}"
            )


def _apart(one: Tensor, other: Tensor) -> float:
    """The share of itself by which `one` differs; whole numbers that follow from others may differ by rounding."""
    if not (one.is_floating_point() or one.is_complex()):
        return float((one != other).any())
    known = one.isfinite() & other.isfinite()
    size = float(torch.linalg.vector_norm(one[known].double()))
    return float(torch.linalg.vector_norm((one - other)[known].double())) / size if size else 0.0
