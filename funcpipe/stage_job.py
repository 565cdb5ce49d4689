"""What a stage's bundle of code holds besides its module."""

from collections.abc import Callable
from dataclasses import dataclass

from funcpipe.computation import LossFunction, OptimizerFactory
from funcpipe.core import Plan, Routes, Wire
from funcpipe.data import MapDataset
from funcpipe.graph import Signature
from funcpipe.norms import GradientNorm, LossScale


@dataclass(frozen=True)
class StageJob:
    """What a stage needs to train. `dataset` makes the dataset, in the stages that need it."""

    routes: Routes
    signature: Signature
    loss: LossFunction
    optimizer: OptimizerFactory
    dataset: Callable[[], MapDataset] | None
    samples: int
    shuffle: bool
    clip_grad_norm: float | None = None

    def norm(self, plan: Plan) -> GradientNorm:
        """What scales the loss, where gradients travel in 16-bit floats of little range, and clips gradients."""
        loss_scale = LossScale() if plan.gradient_wire is Wire.FP16 else None
        return GradientNorm(clip_grad_norm=self.clip_grad_norm, loss_scale=loss_scale)
