"""What a stage's code bundle holds besides its module, and how a function makes its parts of that."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from funcpipe.comm import codec
from funcpipe.comm.collectives import pattern
from funcpipe.core import Plan, Routes, Wire, WorkerSpec
from funcpipe.errors import CorruptMessage
from funcpipe.model.graph import Signature
from funcpipe.model.split import StageModule, load_stage
from funcpipe.platforms.base import Storage
from funcpipe.training.computation import Computation
from funcpipe.training.data import Batches, MapDataset, load_batch
from funcpipe.training.norms import GradientNorm, LossScale
from funcpipe.training.passes import Batch, LossFunction
from funcpipe.training.rng import SeededDataset
from funcpipe.training.stage_optimizer import OptimizerFactory


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

    def batches(self, spec: WorkerSpec) -> Batches:
        """How the dataset is cut into steps and micro-batches."""
        return Batches(
            samples=self.samples,
            global_batch=spec.plan.global_batch,
            micro_batch=spec.plan.micro_batch,
            seed=spec.seed,
            shuffle=self.shuffle,
        )

    def computation(self, stage: StageModule, spec: WorkerSpec) -> Computation:
        """The computation of the worker of `spec` with its module `stage`."""
        plan = spec.plan
        return Computation(
            stage,
            loss=self.loss,
            optimizer=self.optimizer,
            seed=spec.seed,
            recompute=plan.stages[spec.stage].recompute,
            replica=spec.replica,
            replicas=plan.replicas,
            stage_number=spec.stage,
            ties=self.routes.ties,
            norm=self._norm(plan),
            shards=pattern(plan.sync, plan.replicas, plan.streams) if plan.is_sharded else None,
        )

    def loader(self, seed: int) -> Callable[[int, Sequence[int]], Batch]:
        """Makes the dataset; a function that loads, in an epoch, the samples at some indices."""
        if self.dataset is None:
            return _no_data
        dataset = self.dataset()

        def load(epoch: int, indices: Sequence[int]) -> Batch:
            loaded = load_batch(SeededDataset(dataset, seed, epoch), indices)
            return self.signature.bind(loaded.args, loaded.kwargs), loaded.target

        return load

    def _norm(self, plan: Plan) -> GradientNorm:
        """With a loss scale where gradients travel in 16-bit floats of small range, and with clipping as asked for."""
        loss_scale = LossScale() if plan.gradient_wire is Wire.FP16 else None
        return GradientNorm(clip_grad_norm=self.clip_grad_norm, loss_scale=loss_scale)


def load_bundle(spec: WorkerSpec, storage: Storage) -> tuple[StageModule, StageJob]:
    """The module of the stage of `spec`, and its job. Raises CorruptMessage unless it is the code that `spec` names."""
    bundle = storage.get(spec.bundle)
    if hashlib.sha256(bundle).hexdigest() != spec.bundle_sha256:
        raise CorruptMessage(f"{spec.bundle} is not the code that the invocation names: its SHA-256 differs")
    stage, job = load_stage(bundle, codec.decode(storage.get(spec.parameters)))
    return stage, job


def _no_data(epoch: int, indices: Sequence[int]) -> Batch:
    raise AssertionError("only stages that read data or compute the loss have a dataset")
