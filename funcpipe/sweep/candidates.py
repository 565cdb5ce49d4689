"""Runs made of what a sweep's factory returns, which share what they have in common.

Tracing and trying a model takes seconds, and a plan more. So the first candidate of its kind is prepared as any run is,
and its code and data are uploaded once. One that differs from it in numbers only (initial parameters, seed, what
optimiser and scheduler are made with) takes its layers, plan, code and data, and brings its own parameters.

Two candidates are of one kind if they pickle to the same bytes: models without their parameters, but with all other
tensors, losses, data, and recipes without optimiser and scheduler, whose classes must agree too.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import xxhash
from torch import Tensor

from funcpipe.api import FuncPipe
from funcpipe.client.follow.launch import upload_code
from funcpipe.client.prepare.data import open_with_first
from funcpipe.client.prepare.evaluation import as_validation
from funcpipe.client.prepare.job import Job, SampleOrder
from funcpipe.client.prepare.prepared_run import PreparedRun, SharedCode, check_learning, prepare, prepare_training
from funcpipe.client.prepare.session import Session
from funcpipe.client.prepare.stages import PreparedStage
from funcpipe.core import FaultTolerance, Plan, PlatformSpec, RunAccount, RunSettings, Validation
from funcpipe.core.run_key import RunKey
from funcpipe.core.settings import NO_LIMITS
from funcpipe.core.validation import LOSS, MonitorMode
from funcpipe.errors import InvalidValue, RunUnknown
from funcpipe.model.split.bundle import dump_value
from funcpipe.model.split.stage import trained_by
from funcpipe.platforms.base import RequestMeter, Storage
from funcpipe.runstate.generations import newest_record
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.signing import KeyFolder
from funcpipe.training.data_source import Data
from funcpipe.training.losses import loss_of_output
from funcpipe.training.optimizers import made_optimizer, small_parameters, trainable_shapes
from funcpipe.training.recipe import no_optimizer
from funcpipe.training.stage_job import dump_recipe


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """The training of one trial: the module with its way of learning, and what differs from the sweep's own settings.

    None stands for the sweep's: the data, what is validated on, the epochs, and the seed of the order of samples.
    """

    pipe: FuncPipe
    data: Data | None = None
    validation: Validation | Data | None = None
    epochs: int | None = None
    seed: int | None = None


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The conditions that all trials of a sweep share: data, epochs and batches, the metric, and how they are planned.

    `spec` is planned for, unless there is a `plan`; `faults` are those of every run.
    """

    metric: str
    mode: MonitorMode
    data: Data | None
    validation: Validation | Data | None
    epochs: int
    seed: int
    shuffle: bool
    global_batch: int
    micro_batch: int
    plan: Plan | None
    spec: PlatformSpec
    faults: FaultTolerance
    settings: RunSettings

    def complete(self, made: FuncPipe | Candidate) -> "_Training":
        """Return what a factory has `made` with all its settings; raises InvalidValue for what is missing."""
        if not isinstance(made, FuncPipe | Candidate):
            raise InvalidValue("make", type(made).__name__, "must return a FuncPipe, or a Candidate with one")
        given = made if isinstance(made, Candidate) else Candidate(pipe=made)
        data = self.data if given.data is None else given.data
        validation = self.validation if given.validation is None else given.validation
        if data is None:
            raise InvalidValue("data", None, "must be given to the sweep, or by each Candidate")
        if validation is None:
            raise InvalidValue(
                "validation", None, "must be given to the sweep, or by each Candidate: it has the metric"
            )
        watched = as_validation(validation)
        if self.metric != LOSS and self.metric not in watched.metrics:
            known = ", ".join((LOSS, *watched.metrics))
            raise InvalidValue("metric", self.metric, f"must be one of {known}, which the validation has")
        return _Training(
            pipe=given.pipe,
            data=data,
            validation=replace(watched, monitor=self.metric, mode=self.mode),
            epochs=given.epochs or self.epochs,
            seed=self.seed if given.seed is None else given.seed,
        )


@dataclass(frozen=True, kw_only=True)
class _Training:
    """A candidate with all its settings."""

    pipe: FuncPipe
    data: Data
    validation: Validation
    epochs: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """The first candidate of a kind, prepared; `places` says which tensor of a model each tensor of a stage is."""

    prepared: PreparedRun
    code: Keys
    places: tuple[Mapping[str, int], ...]


class Candidates:
    """Makes runs of candidates, for one sweep of the name `sweep`, whose objects `run_key` signs."""

    def __init__(self, session: Session, storage: Storage, terms: Terms, *, sweep: str, run_key: RunKey) -> None:
        self._session, self._storage, self._terms = session, storage, terms
        self._sweep, self._run_key = sweep, run_key
        self._kinds: dict[str, _Kind] = {}
        self._digests: dict[int, tuple[Any, str]] = {}

    @property
    def any_ready(self) -> bool:
        """True if any candidate could be prepared so far."""
        return bool(self._kinds)

    def run(self, made: FuncPipe | Candidate, name: str, *, known: bool = False) -> PreparedRun:
        """Return the run called `name` of what the factory has `made`; one that is `known` goes on, if it had begun.

        Raises InputError for what cannot be trained.
        """
        candidate = self._terms.complete(made)
        learner = candidate.pipe.learner
        recipe = learner.recipe
        alike = replace(recipe, optimizer=no_optimizer, scheduler=None)
        code, named = dump_value((learner.model, alike, learner.weights))
        tensors, text = tuple(named.values()), dump_recipe(recipe)
        if text is None:
            raise InvalidValue("optimizer", recipe.optimizer, "must hold no tensors, and be short, in a sweep")
        digest = self._digest(candidate, code, tensors)
        plan = self._begun_plan(name) if known else None
        kind = self._kinds.get(digest) or self._prepared(candidate, tensors, plan or self._terms.plan)
        self._kinds[digest] = kind
        job = replace(kind.prepared.job, recipe=recipe, seed=candidate.seed, epochs=candidate.epochs)
        if recipe.scheduler is not None:
            check_learning(job, has_validation=True, done=0, state=None)
        stages = tuple(
            replace(stage, tensors=_placed(stage, places, tensors))
            for stage, places in zip(kind.prepared.stages, kind.places, strict=True)
        )
        prepared = (self._begun(job, name) if known else None) or replace(kind.prepared, job=job, name=name)
        shared = SharedCode(keys=kind.code, run_key=self._run_key, recipe=text)
        return replace(prepared, stages=stages, shared=shared, meter=RequestMeter())

    def _begun_plan(self, name: str) -> Plan | None:
        """Return the plan by which a client before has begun the run, if it has: functions may still train by it."""
        try:
            return newest_record(self._storage, name).plan
        except RunUnknown:
            return None

    def _begun(self, job: Job, name: str) -> PreparedRun | None:
        """Return a run that a client before has begun; None if it has not."""
        settings = replace(self._terms.settings, name=None, resume=name)
        session = replace(self._session, storage=self._storage)
        try:
            return prepare(job, session, faults=self._terms.faults, settings=settings, has_validation=True)
        except RunUnknown:
            return None

    def _digest(self, candidate: _Training, code: bytes, tensors: tuple[Tensor, ...]) -> str:
        """Return what all candidates of a kind have in common, as a number."""
        validation, learner = candidate.validation, candidate.pipe.learner
        shapes = trainable_shapes(learner.model, learner.recipe.loss)
        trained = {_place(p) for p in (*learner.model.parameters(), *trained_by(learner.recipe.loss).values())}
        digest = xxhash.xxh3_128(code)
        for tensor in tensors:
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            if not tensor.is_meta and _place(tensor) not in trained:
                digest.update(_bytes_of(tensor))
        optimizer = made_optimizer(learner.recipe.optimizer, small_parameters(shapes))
        groups = [[len(group["params"]), *sorted(group)] for group in optimizer.param_groups]
        digest.update(repr((type(optimizer), groups, learner.recipe.lr_schedule, learner.blocks)).encode())
        settings = {name: value for name, value in vars(validation).items() if name not in ("data", "metrics")}
        digest.update(repr(sorted(settings.items())).encode())
        for value in (candidate.data, validation.data, validation.metrics):
            digest.update(self._digest_of(value).encode())
        return digest.hexdigest()

    def _digest_of(self, value: Any) -> str:
        """Return the digest of data or metrics of the user's; the same object is read once."""
        known = self._digests.get(id(value))
        if known is not None and known[0] is value:
            return known[1]
        try:
            code, tensors = dump_value(value)
        except Exception:  # noqa: BLE001 - whatever pickling raises: it is refused when the first is prepared
            code, tensors = f"object {id(value)}".encode(), {}
        digest = xxhash.xxh3_128(code)
        for tensor in tensors.values():
            digest.update(_bytes_of(tensor))
        self._digests[id(value)] = (value, digest.hexdigest())
        return digest.hexdigest()

    def _prepared(self, candidate: _Training, tensors: tuple[Tensor, ...], plan: Plan | None) -> _Kind:
        """Prepare the first of a kind as any run, by `plan` if there is one, and upload its code and data."""
        terms, pipe = self._terms, candidate.pipe
        prepared = prepare_training(
            pipe.learner,
            candidate.data,
            plan or self._cheapest_plan(candidate),
            SampleOrder(epochs=candidate.epochs, seed=candidate.seed, shuffle=terms.shuffle),
            replace(self._session, storage=self._storage),
            candidate.validation,
            faults=terms.faults,
            limits=NO_LIMITS,
            settings=terms.settings,
            spec=terms.spec,
        )
        code = Keys(f"{self._sweep}-code-{secrets.token_hex(3)}", nonce=self._run_key.fingerprint)
        KeyFolder().keep(code, self._run_key)
        upload_code(prepared, code)
        places = {_place(tensor): number for number, tensor in enumerate(tensors) if tensor.data_ptr()}
        found = tuple(
            {name: places[_place(t)] for name, t in stage.tensors.items() if _place(t) in places}
            for stage in prepared.stages
        )
        return _Kind(prepared=replace(prepared, account=RunAccount()), code=code, places=found)

    def _cheapest_plan(self, candidate: _Training) -> Plan:
        """Return the cheapest plan for the sweep's platform."""
        terms, pipe = self._terms, candidate.pipe
        _, _, first = open_with_first(candidate.data, pipe.model, micro_batch=terms.micro_batch)
        batch = first.batch
        pipe.profile(
            dict(batch.kwargs) or batch.args,
            sample_target=None if pipe.learner.recipe.loss is loss_of_output else batch.target,
            platform=terms.spec,
            micro_batch=terms.micro_batch,
            repeats=2,
        )
        return pipe.optimize(global_batch=terms.global_batch)


def _placed(stage: PreparedStage, places: Mapping[str, int], tensors: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Return the tensors of a stage with those of another model in their places; all others are the kind's."""
    return {name: tensors[places[name]] if name in places else tensor for name, tensor in stage.tensors.items()}


def _place(tensor: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride())


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
