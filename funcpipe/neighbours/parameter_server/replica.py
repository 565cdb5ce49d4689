"""A worker's computation: gradients of micro-batches, with the parameters that it has pulled."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from funcpipe.core import Wire
from funcpipe.model.split import StageModule, load_stage
from funcpipe.neighbours.parameter_server.values import Chunk, Push
from funcpipe.platforms.base import RequestMeter, Storage
from funcpipe.training.batches import Step
from funcpipe.training.computation import Computation
from funcpipe.training.loading import SeededDataset, batch_selector
from funcpipe.training.passes import Batch
from funcpipe.training.stage_job import StageJob


@dataclass(frozen=True, kw_only=True)
class ServerJob:
    """The whole model as one stage: its code and tensors, as they are sent to workers and to the server."""

    bundle: bytes
    tensors: Mapping[str, Tensor]
    seed: int

    def load(self) -> tuple[StageModule, StageJob, Computation]:
        """The model, its job, and a computation that keeps the gradients as one vector, to be summed elsewhere."""
        stage, job = load_stage(self.bundle, {name: tensor.clone() for name, tensor in self.tensors.items()})
        computation = Computation(
            stage,
            recipe=job.recipe,
            seed=self.seed,
            recompute=False,
            replica=0,
            replicas=2,  # so that there is a vector to be summed
            norm=job.recipe.gradient_norm(),
            whole=job.parameters,
            wire_sync=Wire.FP32,
            hooks=job.hooks,
        )
        return stage, job, computation


def data_key(run: str, name: str) -> str:
    """The key of the object `name` of the run's data."""
    return f"{run}/server/data/{name}"


class Replica:
    """A copy of the model that computes gradients, and never updates itself."""

    def __init__(self, job: ServerJob, storage: Storage, run: str) -> None:
        stage, loaded, self._computation = job.load()
        assert loaded.data is not None, "the whole model reads data"
        source = loaded.data.open(storage, lambda name: data_key(run, name), RequestMeter())
        self._dataset, self._collate, self._seed = source.dataset, source.options.collate, job.seed
        self._keep = batch_selector(stage, loaded.signature)
        self._parameters = dict(stage.named_parameters())

    def work(self, version: int, parameters: Mapping[str, Tensor], chunk: Chunk) -> Push:
        """The gradients of `chunk` at `parameters`, which have seen `version` updates. Raises NotFinite, DataError."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(parameters[name])
        parts = [(number,) for number in chunk.numbers] if chunk.separate else [chunk.numbers]
        found = [self._gradients(chunk.step, numbers) for numbers in parts]
        return Push(
            version=version,
            chunk=chunk,
            vectors=tuple(vector for vector, _ in found),
            loss_sums=tuple(loss for _, loss in found),
        )

    def _gradients(self, step: Step, numbers: tuple[int, ...]) -> tuple[Tensor, float]:
        def take(number: int) -> Batch:
            loaded = SeededDataset(self._dataset, self._seed, step.epoch).batch(
                step.micro_batches[number], self._collate
            )
            return self._keep(loaded)

        computation = self._computation
        computation.begin_step(step, take, own=numbers)
        for number in numbers:
            computation.forward(number)
            computation.backward(number)
        computation.flatten()
        return computation.flat.vector.clone(), computation.passes.loss_sum
