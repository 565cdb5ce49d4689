"""The arithmetic of training around a parameter server: replicas compute gradients, the server sums and applies them.

The sum of a synchronous step is that of one process, which adds up the gradients of micro-batches one after another:
workers push each by itself, and the server adds them by number, in whatever order and from whatever worker they came.
Of the server's state storage keeps the two newest checkpoints, each a file of tensors and one of JSON. The JSON is
written last and holds the SHA-256 of the tensors: without it, there is no checkpoint.
"""

import hashlib
import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from funcpipe.core import Wire
from funcpipe.core.texts import error_text
from funcpipe.errors import CorruptMessage, PlanError
from funcpipe.model.split import StageModule, load_stage
from funcpipe.neighbours.parameter_server.worker_group import Chunk, Progress, Push
from funcpipe.platforms.base import RequestMeter, Storage
from funcpipe.runstate.checkpoints import deserialised, serialised
from funcpipe.training.batches import Step
from funcpipe.training.computation import Computation
from funcpipe.training.loading import SeededDataset, batch_selector
from funcpipe.training.passes import Batch
from funcpipe.training.stage_job import StageJob
from funcpipe.training.state import StageState, settings_from_text, settings_to_text


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


class Applied:
    """The ids of all micro-batches that have been applied: all below `below`, and those in `beyond`."""

    def __init__(self, below: int = 0, beyond: Iterable[int] = ()) -> None:
        self.below = below
        self.beyond = set(beyond)

    def __contains__(self, number: int) -> bool:
        return number < self.below or number in self.beyond

    def add(self, numbers: Iterable[int]) -> None:
        """Count `numbers` as applied."""
        self.beyond |= {number for number in numbers if number >= self.below}
        while self.below in self.beyond:
            self.beyond.remove(self.below)
            self.below += 1


class ParameterServer:
    """The parameters and the optimiser. `version` counts updates; methods may be called from several threads."""

    def __init__(self, job: ServerJob) -> None:
        self._stage, _, self._computation = job.load()
        self._lock = threading.Lock()
        self._collected: dict[int, tuple[Tensor, float]] = {}
        self.version = 0
        self.samples = 0
        self.applied = Applied()

    @property
    def parameter_bytes(self) -> int:
        """Bytes that a pull moves, and about those of a push."""
        return sum(parameter.nbytes for parameter in self._stage.parameters())

    def pull(self) -> tuple[int, dict[str, Tensor]]:
        """The version and a copy of the parameters."""
        with self._lock:
            return self.version, {name: p.detach().clone() for name, p in self._stage.named_parameters()}

    def collect(self, push: Push) -> None:
        """Keep the gradients of a synchronous push until its step's `update`; those of another version are dropped.

        A micro-batch that comes twice, because its first worker seemed lost, has the same bits both times.
        """
        with self._lock:
            if push.version == self.version:
                found = zip(push.vectors, push.loss_sums, strict=True)
                self._collected |= dict(zip(push.chunk.numbers, found, strict=True))

    def update(self, step: Step, ids: Iterable[int]) -> float:
        """Sum what was collected of `step`, in order of micro-batches, and take the step; returns its mean loss.

        Raises NotFinite if the recipe says so.
        """
        with self._lock:
            missing = set(range(len(step.micro_batches))) - self._collected.keys()
            if missing:
                raise PlanError(f"step {step.number} cannot be taken: micro-batches {sorted(missing)} were not pushed")
            parts = [self._collected[number] for number in range(len(step.micro_batches))]
            self._collected = {}
            self._take(step, [vector for vector, _ in parts])
            self.applied.add(ids)
            self.samples += step.samples
            return sum(loss for _, loss in parts) / step.samples

    def apply(self, push: Push, step: Step) -> tuple[float, int] | None:
        """Take an asynchronous step with one push; return its mean loss and its staleness.

        None if it was applied before: its worker seemed lost, and was not.
        """
        with self._lock:
            if any(number in self.applied for number in push.chunk.ids):
                return None
            staleness = self.version - push.version
            self._take(step, push.vectors)
            self.applied.add(push.chunk.ids)
            self.samples += step.samples
            return sum(push.loss_sums) / step.samples, staleness

    def progress(self) -> Progress:
        """The updates, the samples and the ids applied so far."""
        with self._lock:
            return Progress(
                version=self.version,
                samples=self.samples,
                below=self.applied.below,
                beyond=tuple(sorted(self.applied.beyond)),
            )

    def state(self) -> tuple[StageState, dict[str, object]]:
        """A copy of the trained state, and the progress of the run, as JSON."""
        with self._lock:
            state = self._computation.state()
            tensors = {name: tensor.clone() for name, tensor in state.tensors.items()}
            copied = StageState(
                tensors=tensors, aliases=state.aliases, transient=state.transient, settings=state.settings
            )
            progress: dict[str, object] = {"version": self.version, "samples": self.samples}
            progress |= {"below": self.applied.below, "beyond": sorted(self.applied.beyond)}
            return copied, progress

    def restore(self, state: StageState, progress: Mapping[str, object]) -> None:
        """Go back to what `state` returned. Raises CorruptMessage if it is another model's."""
        numbers = {name: progress[name] for name in ("version", "samples", "below")}
        beyond = progress["beyond"]
        assert isinstance(beyond, list), "checked where it was read"
        with self._lock:
            self._computation.restore(state)
            self.version, self.samples, below = (int(str(number)) for number in numbers.values())
            self.applied = Applied(below, beyond)
            self._collected = {}

    def state_dict(self) -> dict[str, Tensor]:
        """The model's `state_dict`."""
        return dict(self.state()[0].state_dict())

    def _take(self, step: Step, vectors: Iterable[Tensor]) -> None:
        computation = self._computation
        computation.begin_step(step, _nothing_is_loaded, own=())
        first, *others = vectors
        computation.flatten()
        total = computation.flat.vector.copy_(first)
        for vector in others:
            total.add_(vector)
        if computation.norm.is_needed:
            computation.measure_norm()
        computation.update()
        self.version += 1


def _nothing_is_loaded(micro_batch: int) -> Batch:
    raise AssertionError(f"the server computes no micro-batch, not {micro_batch}")


_KEPT = 2
_FIELDS = ("version", "samples", "below")


class ServerCheckpoints:
    """The checkpoints of the server of `run`."""

    def __init__(self, storage: Storage, run: str) -> None:
        self._storage = storage
        self._prefix = f"{run}/server/checkpoints/"

    def save(self, server: ParameterServer) -> None:
        """Write a checkpoint, and delete all but the newest ones."""
        state, progress = server.state()
        name = f"{self._prefix}{progress['version']:010d}"
        tensors = serialised(state.tensors)
        document = {
            "sha256": hashlib.sha256(tensors).hexdigest(),
            "aliases": dict(state.aliases),
            "transient": sorted(state.transient),
            "settings": settings_to_text(state.settings),
            "progress": progress,
        }
        self._storage.put(f"{name}.safetensors", tensors)
        self._storage.put(f"{name}.json", json.dumps(document).encode())
        for old in self._names()[:-_KEPT]:
            self._storage.delete(f"{old}.json")
            self._storage.delete(f"{old}.safetensors")

    def restore_into(self, server: ParameterServer) -> bool:
        """Bring `server` to the newest checkpoint; False if there is none. Raises CorruptMessage."""
        names = self._names()
        if not names:
            return False
        server.restore(*self._read(names[-1]))
        return True

    def _names(self) -> list[str]:
        found = sorted(self._storage.list(self._prefix))
        return [key.removesuffix(".json") for key in found if key.endswith(".json")]

    def _read(self, name: str) -> tuple[StageState, Mapping[str, object]]:
        try:
            document = json.loads(self._storage.get(f"{name}.json"))
            data = self._storage.get(f"{name}.safetensors")
            if hashlib.sha256(data).hexdigest() != document["sha256"]:
                raise CorruptMessage(f"{name}.safetensors is not what {name}.json names: its SHA-256 differs")
            progress = document["progress"]
            if not all(isinstance(progress[field], int) for field in _FIELDS) or not isinstance(
                progress["beyond"], list
            ):
                raise CorruptMessage(f"{name}.json does not say how far the run has come")
            state = StageState(
                tensors=deserialised(f"{name}.safetensors", data),
                aliases=dict(document["aliases"]),
                transient=frozenset(document["transient"]),
                settings=settings_from_text(document["settings"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptMessage(f"{name}.json is no checkpoint: {error_text(error)}") from error
        return state, progress
