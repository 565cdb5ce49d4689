"""The loss of a micro-batch, checked; and that of a batch beside those of its parts."""

import math
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from funcpipe.core import Reduction
from funcpipe.core.texts import error_line
from funcpipe.errors import DataError, FuncPipeError, ModelError
from funcpipe.model.graph.user_code import users_frame
from funcpipe.training.losses import LossFunction, WeightedLoss, seed_loss

OFF = "rehearse=False (--set training.rehearsal=false) starts without this check"

MEAN = "it must return the mean over the samples that it is given, as torch's losses do with reduction='mean'"


def loss_of(loss: LossFunction, output: Any, target: Any, *, seed: int) -> Tensor:
    """The loss, one number with a gradient. Raises DataError or ModelError for anything else."""
    seed_loss(seed, 0, 0)
    try:
        with torch.enable_grad(), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found: Any = loss(output, target)
    except FuncPipeError:
        raise
    except Exception as error:
        raise DataError(
            f"the loss function fails on the first micro-batch{_line(error)}: {error_line(error).rstrip('.')}. The "
            f"model's output is {described(output)}, the target is {described(target)}{_hint(output, target)}"
        ) from error
    _check_shapes(warned, output, target)
    if isinstance(found, tuple) and isinstance(loss, WeightedLoss):
        found = found[0] / found[1] if found[1] else found[0]
    if isinstance(found, tuple) and len(found) == 2:
        raise DataError(
            "the loss function returns a tuple, not a tensor; for a sum and its weight give reduction='weighted' "
            f"(--set training.reduction=weighted), or else {MEAN}"
        )
    if not isinstance(found, Tensor):
        raise DataError(f"the loss function returns a {type(found).__name__}, not a tensor: {MEAN}")
    if found.numel() != 1:
        raise DataError(f"the loss function returns {described(found)}, not one number: {MEAN}")
    if not found.is_floating_point():
        raise DataError(f"the loss function returns {described(found)}, which has no gradient: {MEAN}")
    if not found.requires_grad:
        raise ModelError(
            "the loss has no gradient: nothing that requires one leads to it. Either no parameter of the model "
            "requires a gradient, or the way to the loss is cut off, as by detach(), argmax() or torch.no_grad()"
        )
    return found.reshape(())


def _check_shapes(warned: list[warnings.WarningMessage], output: Any, target: Any) -> None:
    """Raise DataError if torch has warned that output and target are broadcast; pass other warnings on."""
    for one in warned:
        if str(one.message).startswith("Using a target size"):
            raise DataError(
                f"the loss function compares every output with every target, as their shapes differ: the output is "
                f"{described(output)}, the target is {described(target)}; give both one shape, as with "
                f"target.unsqueeze(1) or output.squeeze(1). {OFF}"
            )
        warnings.showwarning(one.message, one.category, one.filename, one.lineno)


def names_of(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested tuples, lists and dictionaries, with their places."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from names_of(item, f"{name} {key}")
    elif isinstance(value, tuple | list):
        for i, item in enumerate(value):
            yield from names_of(item, f"{name}[{i}]")


def described(value: Any) -> str:
    """A tensor's dtype and shape, and the range of whole numbers; of anything else, its type."""
    if not isinstance(value, Tensor):
        parts = ", ".join(described(tensor) for _, tensor in list(names_of(value, ""))[:3])
        return f"a {type(value).__name__}" + (f" of {parts}" if parts else "")
    text = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if value.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8) and value.numel():
        text += f" from {int(value.min())} to {int(value.max())}"
    return text


def _hint(output: Any, target: Any) -> str:
    """The most frequent cause for a target that the loss does not take."""
    if not isinstance(output, Tensor) or not isinstance(target, Tensor) or output.dim() < 1:
        return ""
    if target.dim() == output.dim() - 1:
        classes = output.size(1 if output.dim() > 1 else 0)
        if target.is_floating_point():
            return "; class indices must be whole numbers, of dtype torch.int64"
        if target.numel() and (int(target.max()) >= classes or int(target.min()) < 0):
            return f"; class indices must lie between 0 and {classes - 1}, for {classes} outputs"
    if target.is_floating_point() and output.dtype != target.dtype:
        return f"; the target should be {str(output.dtype).removeprefix('torch.')} as the output is"
    return "; their shapes and types must be those that the loss function takes" if output.shape != target.shape else ""


def _line(error: BaseException) -> str:
    """The last line of the user's own code that led to `error`, if there is one below the call of the loss."""
    found = users_frame(traceback.walk_tb(error.__traceback__))
    return "" if found is None else f", in {found[0].f_code.co_filename}:{found[1]}"


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The loss of a batch of so many `samples` as a `whole`, and the losses of its `parts` with what these weigh: their
    samples, or the weights that the loss returns.

    Their gradients are `apart` by this share of themselves; None where there are none.
    """

    whole: float = 0.0
    parts: tuple[tuple[float, float], ...] = ()
    samples: int = 0
    apart: float | None = None
    tolerance: float = 0.0

    @classmethod
    def nothing(cls) -> "Compared":
        """A comparison of nothing, which does not differ."""
        return cls(apart=0.0)

    @classmethod
    def of(
        cls,
        whole: float,
        parts: Sequence[tuple[float, float]],
        *,
        samples: int,
        weight: float,
        gradients: Sequence[Tensor],
        sums: Sequence[Tensor],
        tolerance: float,
    ) -> "Compared":
        """Compare the `gradients` of the whole, of this `weight`, with the `sums` of its parts' by their shares."""
        adds_up = math.isclose(weight, sum(own for _, own in parts), rel_tol=tolerance)
        apart = _norm([a.double() - b for a, b in zip(gradients, sums, strict=True)])
        size = max(_norm(gradients), _norm(sums))
        return cls(
            whole=whole,
            parts=tuple(parts),
            samples=samples,
            apart=math.inf if not (adds_up and math.isfinite(apart)) else apart / size if size else None,
            tolerance=tolerance,
        )

    @property
    def mean(self) -> float:
        """The mean of the losses of the parts."""
        return sum(loss * weight for loss, weight in self.parts) / (sum(weight for _, weight in self.parts) or 1.0)

    @property
    def differs(self) -> bool:
        """True if the one differs from the other by more than rounding."""
        apart = self.apart is not None and self.apart > self.tolerance
        return apart or not math.isclose(self.whole, self.mean, rel_tol=self.tolerance)

    @property
    def is_sum(self) -> bool:
        """True if the loss adds up over samples."""
        return math.isclose(self.whole, sum(loss for loss, _ in self.parts), rel_tol=max(self.tolerance, 1e-3))


def mean_and_weight(found: Any, samples: int) -> tuple[Tensor, float]:
    """The mean of what a loss function has found for so many samples, and what that weighs."""
    if not isinstance(found, tuple):
        return found.reshape(()), float(samples)
    total, weight = found
    return (total / weight if weight else total * 0), weight


def rounding_of(tensor: Tensor) -> float:
    """The bound of rounding: where numbers have 16 bits, more than where they have 32."""
    return 4 * torch.finfo(tensor.dtype).eps if tensor.dtype in (torch.float16, torch.bfloat16) else 0.0


def as_refused(
    found: Compared, global_batch: int, reduction: Reduction = Reduction.MEAN, *, own_loss: bool = False
) -> str:
    """The error for such a loss, and the way out; the model's own loss is computed in its forward."""
    if reduction is not Reduction.MEAN:
        return (
            f"the loss of a batch is not the sum over its micro-batches, divided by the sum of their weights, as "
            f"reduction={reduction.value!r} says: it is {found.whole:.6g} for {found.samples} samples together, and "
            f"{found.mean:.6g} from parts of them. With 'weighted', return sums of terms that do not depend on other "
            "samples, and of their weights; with 'tokens', the mean over all targets that are not ignored, as "
            f"torch.nn.functional.cross_entropy gives it, unshifted. {OFF}"
        )
    if found.is_sum:
        return (
            f"the loss is a sum over samples, not their mean: {found.whole:.6g} for {found.samples} samples, and "
            f"{', '.join(f'{loss:.6g}' for loss, _ in found.parts)} for parts of them; {MEAN}. {OFF}"
        )
    gradients = "" if not found.apart or math.isinf(found.apart) else f" (gradients differ by {found.apart:.2g} of it)"
    return (
        f"the loss of a batch is not the mean of its micro-batches' losses: it is {found.whole:.6g} for "
        f"{found.samples} samples together, and the mean over parts of {found.parts[0][1]:.0f} is "
        f"{found.mean:.6g}{gradients}. A function computes one micro-batch at a time, so what samples of different "
        "micro-batches have in common would be missing: what contrasts or ranks samples, or a mean over something else "
        "than samples, such as tokens that are no padding or weights of classes. Such a mean is exact if the loss "
        "returns (sum, weight) and reduction='weighted' is given, or 'tokens' for torch's mean over targets that are "
        f"not ignored. For all others, {_CACHE if not own_loss else ''}plan for one micro-batch per global batch "
        f"(micro_batch={global_batch}, replicas=1), or give coupled='accumulate' (--set training.coupled=accumulate) "
        f"to train on the mean of the micro-batches' losses, as gradient accumulation does. {OFF}"
    )


_CACHE = (
    "plan and train with coupled='cache' (--set training.coupled=cache), which keeps the outputs of all micro-batches "
    "and computes the loss once, for the whole batch; or "
)


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(torch.linalg.vector_norm(t.detach()).double()) ** 2 for t in tensors))
