"""The contents of a stage's code bundle besides its module, and a function's parts made of it."""

import base64
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from funcpipe.comm import codec
from funcpipe.comm.collectives import pattern_of
from funcpipe.comm.weight_files import StoredTensor, below, fill, opening
from funcpipe.core import MB, Routes, Wire, WorkerSpec
from funcpipe.core.settings import WHY_GONE
from funcpipe.core.start import StartPart
from funcpipe.errors import CorruptMessage, KeyMissing, StorageError
from funcpipe.model.deferred import Made
from funcpipe.model.draws import is_from_torch
from funcpipe.model.graph import Signature
from funcpipe.model.split import StageModule, load_stage
from funcpipe.model.split.bundle import dump_value, load_value
from funcpipe.platforms.base import Invoked, OpenStorage, RequestMeter, Storage
from funcpipe.training.batches import Batches, ShardedSamples
from funcpipe.training.computation import Computation
from funcpipe.training.data import LoadedBatch
from funcpipe.training.data_source import DataSource, StoredData, of_evaluation
from funcpipe.training.device import HOST, Device
from funcpipe.training.evaluation import StageEvaluation
from funcpipe.training.loading import Loader, Order, batch_selector
from funcpipe.training.local_steps import Meetings
from funcpipe.training.losses import LossFunction, loss_of_output
from funcpipe.training.optimizers import ParameterShape
from funcpipe.training.output_cache import BatchLayout
from funcpipe.training.parameter_hooks import NamedHooks
from funcpipe.training.passes import Batch
from funcpipe.training.recipe import Recipe

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StageWeights:
    """The tensors of a stage that are not uploaded with it, by name: those in files of weights or of what the run does
    not change, and those that the constructor of the model computes.

    `open_storage` opens the storage of a file.
    """

    stored: Mapping[str, StoredTensor]
    made: Mapping[str, Made]
    open_storage: OpenStorage

    def within(self, storage: Storage, folder: str) -> "StageWeights":
        """Return the same, where files without a URL are in `storage`, and in `folder` unless they say where."""
        stored = {name: below(tensor, folder) for name, tensor in self.stored.items()}
        return replace(self, stored=stored, open_storage=opening(storage, self.open_storage))

    def fill(self, stages: Iterable[nn.Module], seed: int, meter: RequestMeter) -> None:
        """Read and compute them, with random numbers by `seed`, into the tensors of `stages`.

        Raises CorruptMessage if files have changed since the run began.
        """
        began_s = time.monotonic()
        targets: dict[int, tuple[StoredTensor, Tensor]] = {}
        for stage in stages:
            named = (*stage.named_parameters(remove_duplicate=False), *stage.named_buffers(remove_duplicate=False))
            targets |= {id(tensor): (self.stored[name], tensor) for name, tensor in named if name in self.stored}
            for name, tensor in named:
                if name in self.made:
                    tensor.detach().copy_(self.made[name].compute(seed))
        read, seconds = fill(targets.values(), self.open_storage, meter), time.monotonic() - began_s
        _log.info("read %.1f MB of weights in %.2f s", read / MB, seconds)


@dataclass(frozen=True)
class StageJob:
    """The parts of a stage's training. `data` says what data it loads, if it loads any.

    `parameters` are the trainable ones of the whole model. With an `evaluation` it is validated, or only evaluated if
    it trains no epochs. `hooks` are those of the stage's parameters; `layout` says how outputs lie side by side, if the
    loss is computed for the whole batch. `weights` are those that the stage begins with, as far as they lie in files.
    """

    routes: Routes
    signature: Signature
    recipe: Recipe
    data: StoredData | None
    samples: int
    shuffle: bool
    parameters: tuple[ParameterShape, ...] = ()
    shards: ShardedSamples | None = None
    drop_last: bool = False
    evaluation: StageEvaluation | None = None
    hooks: NamedHooks = field(default_factory=dict)
    layout: BatchLayout | None = None
    weights: StageWeights | None = None

    def batches(self, spec: WorkerSpec) -> Batches:
        """Return the dataset cut into steps and micro-batches."""
        return Batches(
            samples=self.samples,
            global_batch=spec.plan.global_batch,
            micro_batch=spec.plan.micro_batch,
            seed=spec.seed,
            shuffle=self.shuffle,
            shards=self.shards,
            drop_last=self.drop_last,
        )

    def meetings(self, spec: WorkerSpec) -> Meetings | None:
        """Return when replicas meet that train alone in between; None where they do not."""
        if not spec.plan.trains_locally or not spec.epochs:
            return None
        steps = spec.epochs * self.batches(spec).steps_per_epoch
        every = None if self.evaluation is None else self.evaluation.every
        return Meetings(plan=spec.plan, steps=steps, validate_every=every)

    def move(self, stage: StageModule, device: Device) -> None:
        """Move to `device` all that the worker with the module `stage` computes with."""
        device.move(stage, loss=self.recipe.loss)
        if self.evaluation is not None:
            device.move(self.evaluation.stage, loss=self.evaluation.loss)

    def computation(self, stage: StageModule, spec: WorkerSpec, device: Device = HOST) -> Computation:
        """Return the computation of the worker of `spec` with its module `stage`, which is on `device`."""
        plan, recipe = spec.plan, self.recipe
        if not spec.epochs:  # nothing is summed or updated where nothing is trained
            plan, recipe = replace(plan, replicas=1, shard_optimizer=False), replace(recipe, teachers=())
        return Computation(
            stage,
            recipe=recipe,
            seed=spec.seed,
            recompute=plan.stages[spec.stage].recompute,
            replica=spec.replica,
            replicas=plan.replicas,
            stage_number=spec.stage,
            ties=self.routes.ties,
            norm=recipe.gradient_norm(small_range=plan.gradient_wire is Wire.FP16),
            whole=self.parameters,
            wire_sync=plan.wire_sync,
            shards=pattern_of(plan, spec.stage) if plan.is_sharded else None,
            summed_as=pattern_of(plan, spec.stage) if plan.replicas > 1 else None,
            hooks=self.hooks,
            layout=self.layout,
            meetings=self.meetings(spec),
            device=device,
        )

    def loader(
        self,
        stage: StageModule,
        spec: WorkerSpec,
        storage: Storage,
        key_of: Callable[[str], str],
        meter: RequestMeter,
    ) -> Loader | None:
        """Loads the micro-batches of the worker of `spec` with its module `stage`; None if it loads no data.

        `key_of` gives the keys of the objects of the data, which are read from `storage`; `meter` counts what a dataset
        in object storage asks for besides.
        """
        if self.data is None:
            return None
        order = Order(self.batches(spec), epochs=spec.epochs, replica=spec.replica, replicas=spec.plan.replicas)
        keep = batch_selector(stage, self.signature)
        return _loader(self.data.open(storage, key_of, meter), order, keep, spec.seed)

    def evaluation_loader(
        self, spec: WorkerSpec, storage: Storage, key_of: Callable[[str], str], meter: RequestMeter
    ) -> Loader | None:
        """Return the same for what the stage is evaluated on."""
        own = self.evaluation
        assert own is not None, "the stage is not evaluated"
        if own.data is None:
            return None
        source = own.data.open(storage, lambda name: key_of(of_evaluation(name)), meter)
        order = Order(own.batches(spec.plan), epochs=1, replica=spec.replica, replicas=spec.plan.replicas)
        return _loader(source, order, batch_selector(own.stage, own.signature), spec.seed)


def _loader(source: DataSource, order: Order, keep: Callable[[LoadedBatch], Batch], seed: int) -> Loader:
    return Loader(source.dataset, source.options, order, seed=seed, keep=keep)


def dump_recipe(recipe: Recipe) -> str | None:
    """Return `recipe` without its loss as text for a payload; None for one with tensors, or too long for that."""
    code, tensors = dump_value(replace(recipe, loss=loss_of_output))
    return base64.b64encode(code).decode() if not tensors and len(code) <= _LONGEST_RECIPE else None


def load_recipe(text: str, loss: LossFunction) -> Recipe:
    """Return the recipe of `dump_recipe` with `loss`. Runs code from `text`, the payload that the client has sent."""
    recipe: Recipe = load_value(base64.b64decode(text), {})
    return replace(recipe, loss=loss)


_LONGEST_RECIPE = 16 << 10
"""The most bytes of a recipe in a payload, of which Function Compute takes 128 kB with all else."""


@dataclass(frozen=True, kw_only=True)
class LoadedStage:
    """The module of a stage and its job, as they were read for `spec`; `tensors` are its own, by name.

    A template process holds one, for functions of the same code, which share its memory.
    """

    spec: WorkerSpec
    stage: StageModule
    job: StageJob
    tensors: Mapping[str, Tensor]

    @classmethod
    def read(cls, spec: WorkerSpec, storage: Storage, invoked: Invoked | None = None, *, base: str) -> "LoadedStage":
        """Read the stage of `spec`. What the run does not change lies in the folder `base`, as far as it was uploaded.

        Raises CorruptMessage unless it is the code that `spec` names, StorageError if it is gone.
        """
        invoked = invoked or Invoked()
        with invoked.start.part(StartPart.CODE):
            bundle = _read(storage, spec.bundle)
        with invoked.start.part(StartPart.TENSORS):
            tensors = codec.decode(_read(storage, spec.parameters))
        with invoked.start.part(StartPart.CODE):
            if hashlib.sha256(bundle).hexdigest() != spec.bundle_sha256:
                raise CorruptMessage(f"{spec.bundle} is not the code that the invocation names: its SHA-256 differs")
            made: dict[str, Tensor] = {}
            stage, job = load_stage(bundle, tensors, made=made)
        read = cls(spec=spec, stage=stage, job=job, tensors=made)
        read._fill(spec, storage, invoked, base)
        return read

    def for_function(self, spec: WorkerSpec, storage: Storage, invoked: Invoked, base: str) -> bool:
        """Give the stage the tensors of `spec`; returns False where that cannot be, as the code is another."""
        if spec.bundle_sha256 != self.spec.bundle_sha256:
            return False
        if (spec.parameters, spec.seed) == (self.spec.parameters, self.spec.seed):
            return True
        with invoked.start.part(StartPart.TENSORS):
            found = codec.decode(_read(storage, spec.parameters))
        own = {name: tensor for name, tensor in self.tensors.items() if not self._is_elsewhere(name)}
        if self._keeps_more or any(not _fits(tensor, found.get(name)) for name, tensor in own.items()):
            return False
        with invoked.start.part(StartPart.TENSORS):
            for name, tensor in own.items():
                tensor.detach().copy_(found[name])
        self._fill(spec, storage, invoked, base)
        return True

    def _fill(self, spec: WorkerSpec, storage: Storage, invoked: Invoked, base: str) -> None:
        if self.job.weights is not None:
            with invoked.start.part(StartPart.TENSORS):
                beside = [] if self.job.evaluation is None else [self.job.evaluation.stage]
                self.job.weights.within(storage, base).fill([self.stage, *beside], spec.seed, invoked.meter)
        self.stage.settle()

    def _is_elsewhere(self, name: str) -> bool:
        weights = self.job.weights
        return weights is not None and (name in weights.stored or name in weights.made)

    @property
    def _keeps_more(self) -> bool:
        """True if a module may have kept, as it was loaded, what follows from tensors: it has a method for that."""
        plain = nn.Module.__setstate__
        own = [module for module in self.stage.modules() if not is_from_torch(module)]
        return any(getattr(type(module), "__setstate__", plain) is not plain for module in own)


def _read(storage: Storage, key: str) -> bytes:
    try:
        return storage.get(key)
    except KeyMissing as error:
        raise StorageError(f"{error}, which was uploaded when the run began: {WHY_GONE}") from error


def _fits(tensor: Tensor, other: Tensor | None) -> bool:
    return other is not None and (tensor.shape, tensor.dtype) == (other.shape, other.dtype)


def load_bundle(spec: WorkerSpec, storage: Storage, invoked: Invoked, *, base: str) -> tuple[StageModule, StageJob]:
    """Return the module of the stage of `spec`, and its job, as the function that was `invoked` needs them: from its
    template, if that has them.

    Raises what `LoadedStage.read` raises.
    """
    loaded = invoked.template
    if not (isinstance(loaded, LoadedStage) and loaded.for_function(spec, storage, invoked, base)):
        loaded = LoadedStage.read(spec, storage, invoked, base=base)
    job = loaded.job
    return loaded.stage, job if not spec.recipe else replace(job, recipe=load_recipe(spec.recipe, job.recipe.loss))
