"""The loss of a batch beside those of its parts, and what is said where the one is not the mean of the others."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from funcpipe.client.rehearsal_loss import MEAN, OFF


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The loss of a batch as a `whole`, and the losses of its `parts` with how many samples they have.

    Their gradients are `apart` by this share of themselves; None where there are none.
    """

    whole: float = 0.0
    parts: tuple[tuple[float, int], ...] = ()
    apart: float | None = None
    tolerance: float = 0.0

    @classmethod
    def nothing(cls) -> "Compared":
        """What cannot be compared, and so does not differ."""
        return cls(apart=0.0)

    @classmethod
    def of(
        cls,
        whole: float,
        parts: Sequence[tuple[float, int]],
        *,
        gradients: Sequence[Tensor],
        sums: Sequence[Tensor],
        tolerance: float,
    ) -> "Compared":
        """With the `gradients` of the whole, and the `sums` of those of its parts by their shares of the samples."""
        apart = _norm([a.double() - b for a, b in zip(gradients, sums, strict=True)])
        size = max(_norm(gradients), _norm(sums))
        return cls(
            whole=whole,
            parts=tuple(parts),
            apart=None if not size else apart / size if math.isfinite(apart) else math.inf,
            tolerance=tolerance,
        )

    @property
    def samples(self) -> int:
        """How many there are."""
        return sum(count for _, count in self.parts)

    @property
    def mean(self) -> float:
        """The mean of the losses of the parts."""
        return sum(loss * count for loss, count in self.parts) / max(self.samples, 1)

    @property
    def differs(self) -> bool:
        """Whether the one is not the other, by more than rounding."""
        apart = self.apart is not None and self.apart > self.tolerance
        return apart or not math.isclose(self.whole, self.mean, rel_tol=self.tolerance)

    @property
    def is_sum(self) -> bool:
        """Whether the loss adds up over samples."""
        return math.isclose(self.whole, sum(loss for loss, _ in self.parts), rel_tol=max(self.tolerance, 1e-3))


def as_refused(found: Compared, global_batch: int) -> str:
    """What is wrong with such a loss, and what to do."""
    if found.is_sum:
        return (
            f"the loss is a sum over samples, not their mean: {found.whole:.6g} for {found.samples} samples, and "
            f"{', '.join(f'{loss:.6g}' for loss, _ in found.parts)} for parts of them; {MEAN}. {OFF}"
        )
    gradients = "" if not found.apart or math.isinf(found.apart) else f" (gradients differ by {found.apart:.2g} of it)"
    return (
        f"the loss of a batch is not the mean of its micro-batches' losses: it is {found.whole:.6g} for "
        f"{found.samples} samples together, and the mean over parts of {found.parts[0][1]} is "
        f"{found.mean:.6g}{gradients}. A function computes one micro-batch at a time, so what samples of different "
        "micro-batches have in common would be missing: what contrasts or ranks samples, or a mean over something else "
        "than samples, such as tokens that are no padding or weights of classes. Either plan for one micro-batch per "
        f"global batch (micro_batch={global_batch}, replicas=1), or give coupled='accumulate' (--coupled accumulate) "
        f"to train on the mean of the micro-batches' losses, as gradient accumulation does. {OFF}"
    )


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(torch.linalg.vector_norm(t.detach()).double()) ** 2 for t in tensors))
