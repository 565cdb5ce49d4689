"""A trial of the assumption of micro-batches: the loss of a batch is the mean of its micro-batches' losses.

A few samples are computed together. Their loss, and its gradient with respect to the model's output, are compared with
those of the same samples in parts: gradients differ where values do not, as at the start of training, when all
tokens have the same loss. To have more targets than outputs, outputs are used for several of them in turn.

A model that computes its loss itself, or makes something of the whole batch, runs on two samples together and on each
alone, without dropout, and with BatchNorm's running statistics.
"""

import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.client.prepare.data import SpreadSamples
from funcpipe.client.prepare.joint_trial import SampleRows, grown_dims, sample_rows, training_quietly
from funcpipe.client.prepare.loss_value import OFF, Compared, as_refused, mean_and_weight, rounding_of
from funcpipe.errors import DataError
from funcpipe.model.draws import generator_states
from funcpipe.model.graph.isolation import preserve_state
from funcpipe.model.graph.modes import evaluation_mode
from funcpipe.model.graph.program import autocast_to
from funcpipe.model.tensors import copied, flatten, is_weightless, stand_in, tensors_in, tree_map
from funcpipe.training.data import LoadedBatch
from funcpipe.training.losses import IGNORED, loss_of_output, seed_loss
from funcpipe.training.recipe import Recipe

_log = logging.getLogger(__name__)

_MODEL_ROUNDING = 1e-3
"""More than of a loss alone: a model's sums depend on the size of the batch."""

_LEAST = 1e-6
"""Parts of the loss that are smaller shares of it are left out."""


def _compare_model(model: nn.Module, recipe: Recipe, samples: SpreadSamples, *, seed: int) -> Compared | None:
    """Compare the losses of some samples, with the model's forward; None if it runs neither in eval nor in training
    mode on so few samples.
    """
    for count in (2, 4):
        indices = samples.unlike(count)
        if len(indices) < count:
            return None
        halves = indices[: count // 2], indices[count // 2 :]
        for mode in (evaluation_mode, training_quietly):
            try:
                batches = [samples.load(part) for part in (indices, *halves)]
                with mode(model):
                    whole, *parts = [
                        _run(model, recipe, batch, len(b), seed)
                        for batch, b in zip(batches, (indices, *halves), strict=True)
                    ]
            except Exception:  # noqa: BLE001 - a model may compute its loss in training only, or not of one sample
                continue
            if whole.draws or any(part.draws for part in parts):
                return Compared.nothing()
            if math.isfinite(whole.loss) and whole.weight:
                return _compared(whole, parts, recipe)
    return None


@dataclass(frozen=True, kw_only=True)
class _Run:
    """The loss of so many samples, and what they weigh; the tensors of the model's output, and the gradients of the
    loss with respect to them. `draws` says whether random numbers were drawn.
    """

    loss: float
    weight: float
    samples: int
    outputs: tuple[Tensor, ...]
    gradients: tuple[Tensor | None, ...]
    draws: bool


def _run(model: nn.Module, recipe: Recipe, batch: LoadedBatch, samples: int, seed: int) -> _Run:
    with preserve_state(model), preserve_state(recipe.loss), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seed_loss(seed, 0, 0)
        before = generator_states()
        with autocast_to(recipe.precision):
            output = model(*batch.args, **batch.kwargs)
            loss, weight = mean_and_weight(recipe.cast_loss(output, batch.target), samples)
        outputs = tuple(leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor) and leaf.requires_grad)
        gradients = torch.autograd.grad(loss, outputs, allow_unused=True) if outputs and loss.requires_grad else ()
        return _Run(
            loss=loss.item(),
            weight=weight,
            samples=samples,
            outputs=tuple(tensor.detach() for tensor in outputs),
            gradients=gradients,
            draws=generator_states() != before,
        )


def _compared(whole: _Run, parts: Sequence[_Run], recipe: Recipe) -> Compared:
    measures = [(whole.loss, sum(part.loss * part.weight / whole.weight for part in parts))]
    if all(len(part.gradients) == len(whole.gradients) for part in parts):
        for number in range(len(whole.gradients)):
            measures += _measures(whole, parts, number)
    floor = _LEAST * max(abs(a) for a, _ in measures)
    apart = [abs(a - b) / max(abs(a), abs(b), floor) for a, b in measures if max(abs(a), abs(b)) > 0]
    return Compared(
        whole=whole.loss,
        parts=tuple((part.loss, part.weight) for part in parts),
        samples=whole.samples,
        apart=max((value if math.isfinite(value) else math.inf for value in apart), default=0.0),
        tolerance=max(
            _MODEL_ROUNDING, 4 * recipe.precision.rounding, *(rounding_of(tensor) for tensor in whole.outputs)
        ),
    )


def _measures(whole: _Run, parts: Sequence[_Run], number: int) -> Iterator[tuple[float, float]]:
    """The measures of one tensor of the output that should agree: the size of the gradients of each part's samples.

    Of a tensor in which samples do not lie, what it adds to the loss.
    """
    output, gradient = whole.outputs[number], whole.gradients[number]
    pairs = [(part, part.outputs[number], part.gradients[number]) for part in parts]
    if gradient is None or any(own is None or own.dim() != output.dim() for _, _, own in pairs):
        return
    grown = grown_dims(output, parts[0].outputs[number], whole.samples, parts[0].samples)
    if not grown and not output.dim():
        yield (
            float(gradient * output),
            sum(float(own * value) * p.weight / whole.weight for p, value, own in pairs if own is not None),
        )
    first = 0
    for part, _, own in pairs if grown else ():
        assert own is not None, "all parts have gradients"
        rows = gradient
        for dim in grown:
            each = gradient.size(dim) // whole.samples
            rows = rows.narrow(dim, first * each, part.samples * each)
        first += part.samples
        yield _norm(rows), _norm(own) * part.weight / whole.weight


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor).double())


_ROUNDING = 1e-4
_PARTS = 4
_OUTPUT = ".0"  # the path of outputs among pairs of output and target
_MOST_BYTES = 2 << 20
"""Bytes of outputs that are used several times, at most."""


def check_is_mean(
    model: nn.Module, recipe: Recipe, first: LoadedBatch, output: Any, samples: SpreadSamples, *, seed: int
) -> None:
    """Raise DataError unless the loss of a batch is the mean of its micro-batches' losses, as far as `samples` show.

    `output` is the model's for the `first` micro-batch. A loss that draws random numbers, or keeps something between
    calls, cannot be compared.
    """
    found: Compared | None = None
    if recipe.loss is not loss_of_output:
        found = _Trial(model, recipe, first, output, samples, seed).compared()
    if found is None and not is_weightless(model):
        found = _compare_model(model, recipe, samples, seed=seed)
    if found is None:
        _log.info("whether the loss of a batch is the mean of its micro-batches' losses could not be tried")
    elif found.differs:
        own_loss = recipe.loss is loss_of_output
        raise DataError(as_refused(found, samples.global_batch, recipe.reduction, own_loss=own_loss))


def check_ignored(samples: SpreadSamples) -> None:
    """Raise DataError if some of `samples` have more targets that torch's losses ignore than others: the loss that a
    model computes of them is a mean over the others, and cannot be tried without its weights.
    """
    loaded = [samples.load([index]) for index in samples.indices]
    found = [tensors_in((batch.args, dict(batch.kwargs))) for batch in loaded]
    counts = {sum(int((leaf == IGNORED).sum()) for leaf in leaves) for leaves in found}
    if len(counts) > 1:
        raise DataError(
            f"some samples have {min(counts)} targets that are ignored ({IGNORED}), and others {max(counts)}, so that "
            "the loss of the model is no mean over samples: that of a batch would not be the mean of its "
            "micro-batches' losses. Give samples with as many targets, by packing; let the model return logits alone, "
            "with a loss_fn and reduction='tokens'; plan for one micro-batch per global batch "
            f"(micro_batch={samples.global_batch}, replicas=1); or give coupled='accumulate' to train on the mean of "
            f"the micro-batches' losses. {OFF}"
        )


class _Incomparable(Exception):
    """The loss is another one each time."""


@dataclass(frozen=True)
class _Trial:
    """A comparison of the loss of some outputs of a model with that of parts of them."""

    model: nn.Module
    recipe: Recipe
    first: LoadedBatch
    output: Any
    samples: SpreadSamples
    seed: int

    def compared(self) -> Compared | None:
        """The comparison; None if outputs or targets do not lie by samples, or the loss fails on parts of them."""
        own = self.samples.micro_batch
        for count in dict.fromkeys((3 if own == 2 else 2, 2 * own)):
            found = self._of(count)
            if found is not None:
                return found
        return None

    def _of(self, count: int) -> Compared | None:
        try:
            batch = self.samples.load(self.samples.unlike(count))
            with torch.no_grad(), autocast_to(self.recipe.precision):
                output = stand_in(self.model(*copied(batch.args), **copied(dict(batch.kwargs))))
        except Exception:  # noqa: BLE001 - a model may be for batches of one size
            return None
        own, found = self.samples.micro_batch, None
        few = sample_rows((output, batch.target), count, (self.output, self.first.target), own)
        many = sample_rows((self.output, self.first.target), own, (output, batch.target), count)
        if few is None or many is None or few.varies:
            return None
        for rows in (few, self._wider(many) or many):
            try:
                found = self._compared(rows, again=rows is few) or found
            except _Incomparable:
                return Compared.nothing()
            except Exception:  # noqa: BLE001 - a loss may be for batches of one size
                continue
            if found is not None and found.differs:
                return found
        return found

    def _wider(self, rows: SampleRows) -> SampleRows | None:
        """The outputs of `rows`, some several times, with as many targets from all over the dataset.

        None if these have another form than those that belong to the outputs.
        """
        output, target = rows.take(range(rows.samples))
        own = sum(leaf.nbytes for leaf in flatten(output)[0] if isinstance(leaf, Tensor)) // rows.samples + 1
        count = min(len(self.samples.indices), max(rows.samples, _MOST_BYTES // own))
        if self.samples.batch is None or count <= rows.samples:
            return None
        everything = len(self.samples.indices)
        targets = sample_rows(self.samples.batch.target, everything, target, rows.samples)
        if targets is None or targets.varies:
            return None
        wider, _ = rows.take([i % rows.samples for i in range(count)])
        found = sample_rows((wider, targets.take(range(count))), count, (output, target), rows.samples)
        return found if found is not None and found.form == rows.form else None

    def _compared(self, found: SampleRows, *, again: bool) -> Compared | None:
        """The loss of all samples of `found`, outputs and targets, beside that of parts of them.

        If it is to be computed `again`, it must be the same.
        """
        named = zip(found.tree.paths(""), found.leaves, strict=True)
        leaves = [tree_map(leaf, _with_gradient) if path.startswith(_OUTPUT) else leaf for path, leaf in named]
        given = found.of(leaves)
        into = [item for leaf in leaves for item in flatten(leaf)[0] if _has_gradient(item)]

        def evaluated(chosen: Sequence[int]) -> tuple[float, float, list[Tensor | None]]:
            output, target = given.take(chosen)
            return self._evaluated(output, target, into, len(chosen))

        rows = range(found.samples)
        whole, weight, gradients = evaluated(rows)
        if again and evaluated(rows)[0] != whole:
            raise _Incomparable
        if not math.isfinite(whole) or not weight:
            return None
        size = max(1, -(-len(rows) // _PARTS))
        parts = [rows[i : i + size] for i in range(0, len(rows), size)]
        losses, sums = [], [None if g is None else torch.zeros_like(g, dtype=torch.float64) for g in gradients]
        for part in parts:
            loss, own_weight, own = evaluated(part)
            losses.append((loss, own_weight))
            for total, gradient in zip(sums, own, strict=True):
                if total is not None and gradient is not None:
                    total.add_(gradient.double(), alpha=own_weight / weight)
        return Compared.of(
            whole,
            losses,
            samples=len(rows),
            weight=weight,
            gradients=[g for g in gradients if g is not None],
            sums=[s for s in sums if s is not None],
            tolerance=max(_ROUNDING, 4 * self.recipe.precision.rounding, *(rounding_of(leaf) for leaf in into)),
        )

    def _evaluated(
        self, output: Any, target: Any, into: Sequence[Tensor], samples: int
    ) -> tuple[float, float, list[Tensor | None]]:
        """The loss, the weight of what it is the mean over, and its gradients with respect to `into`."""
        seed_loss(self.seed, 0, 0)
        before = generator_states()
        with preserve_state(self.recipe.loss), torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss, weight = mean_and_weight(self.recipe.cast_loss(output, target), samples)
            if generator_states() != before:
                raise _Incomparable
        none: list[Tensor | None] = [None] * len(into)
        gradients = torch.autograd.grad(loss, into, allow_unused=True) if loss.requires_grad and into else none
        return loss.item(), weight, list(gradients)


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _with_gradient(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    own = value.detach()
    return own.requires_grad_() if own.is_floating_point() or own.is_complex() else own
