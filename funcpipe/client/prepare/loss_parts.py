"""The loss of a batch beside those of its parts, and the error where the one is not the mean of the others."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from funcpipe.client.prepare.rehearsal_loss import MEAN, OFF
from funcpipe.core import Reduction


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
        f"(micro_batch={global_batch}, replicas=1), or give coupled='accumulate' (--coupled accumulate) to train on "
        f"the mean of the micro-batches' losses, as gradient accumulation does. {OFF}"
    )


_CACHE = (
    "plan and train with coupled='cache' (--coupled cache), which keeps the outputs of all micro-batches and computes "
    "the loss once, for the whole batch; or "
)


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(torch.linalg.vector_norm(t.detach()).double()) ** 2 for t in tensors))
