"""What a stage's bundle of code holds besides its module."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from funcpipe.comm import codec
from funcpipe.core import Plan, Routes, Wire, WorkerSpec
from funcpipe.errors import CorruptMessage
from funcpipe.model.graph import Signature
from funcpipe.model.split import StageModule, load_stage
from funcpipe.platforms.base import Storage
from funcpipe.training.computation import LossFunction, OptimizerFactory
from funcpipe.training.data import MapDataset
from funcpipe.training.norms import GradientNorm, LossScale


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


def load_bundle(spec: WorkerSpec, storage: Storage) -> tuple[StageModule, StageJob]:
    """The stage of `spec` and what comes with it; raises CorruptMessage unless it is the code that `spec` names."""
    bundle = storage.get(spec.bundle)
    if hashlib.sha256(bundle).hexdigest() != spec.bundle_sha256:
        raise CorruptMessage(f"{spec.bundle} is not the code that the invocation names: its SHA-256 differs")
    stage, job = load_stage(bundle, codec.decode(storage.get(spec.parameters)))
    return stage, job
