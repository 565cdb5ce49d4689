"""The loss of a model that computes it itself, or makes something of the whole batch: of a batch, and of its parts.

The model runs on two samples together and on each alone, without dropout, and with BatchNorm's running statistics.
"""

import contextlib
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from funcpipe.client.prepare.loss_parts import Compared, mean_and_weight, rounding_of
from funcpipe.client.prepare.sample_rows import grown_dims
from funcpipe.client.prepare.spread_samples import SpreadSamples
from funcpipe.model.draws import generator_states
from funcpipe.model.graph.isolation import preserve_state
from funcpipe.model.graph.modes import evaluation_mode, training_mode
from funcpipe.model.graph.program import autocast_to
from funcpipe.model.tensors import flatten
from funcpipe.training.data import LoadedBatch
from funcpipe.training.losses import seed_loss
from funcpipe.training.recipe import Recipe

_ROUNDING = 1e-3
"""More than of a loss alone: a model's sums depend on the size of the batch."""

_LEAST = 1e-6
"""Parts of the loss that are smaller shares of it are left out."""


def compare_model(model: nn.Module, recipe: Recipe, samples: SpreadSamples, *, seed: int) -> Compared | None:
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
        tolerance=max(_ROUNDING, 4 * recipe.precision.rounding, *(rounding_of(tensor) for tensor in whole.outputs)),
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


@contextlib.contextmanager
def training_quietly(model: nn.Module) -> Iterator[None]:
    """Put the model in training mode, but for modules that draw random numbers or read the statistics of the batch."""
    quiet = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd)
    with training_mode(model):
        for module in model.modules():
            if isinstance(module, quiet):
                module.eval()
        yield


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor).double())
