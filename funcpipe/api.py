"""An ordinary module, its loss and its optimiser, with the verbs around them: profile, optimize, simulate, train."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

from torch import Tensor, nn

from funcpipe.client.job import Learner, SampleOrder
from funcpipe.client.launch import launch, launch_detached
from funcpipe.client.prepare import PreparedRun, prepare_training
from funcpipe.client.profiling import profile_buckets
from funcpipe.client.results import Progress, RunResult, ignore_progress
from funcpipe.client.session import Session, open_session
from funcpipe.client.site import Site
from funcpipe.core import (
    FaultTolerance,
    ModelProfile,
    Plan,
    PlatformSpec,
    Recompute,
    RunLimits,
    RunSettings,
    ScheduleKind,
    Sync,
    Trace,
    TrainingSpec,
    Wire,
)
from funcpipe.core.settings import DEFAULT_FAULTS, DEFAULT_SETTINGS, NO_LIMITS, RunKeywords, settings_with
from funcpipe.errors import InvalidValue, PlanError
from funcpipe.model.split.module_state import write_attributes
from funcpipe.model.tensors import load_tensors, named_tensors, saved_state
from funcpipe.partitioner.catalog import PROFILED_LAYERS
from funcpipe.partitioner.optimize import optimize
from funcpipe.partitioner.problem.merge import merge_layers
from funcpipe.partitioner.problem.pins import NO_PINS, Pins
from funcpipe.platforms.catalog import LOCAL, load_spec
from funcpipe.profiler import REPEATS, Bucket, buckets_of
from funcpipe.report.predict import predict
from funcpipe.scheduler.simulator.disturbances import Disturbances
from funcpipe.scheduler.simulator.simulate import UNDISTURBED
from funcpipe.training.adapters import loss_of_output, optimizer_kind
from funcpipe.training.data import MapDataset
from funcpipe.training.passes import LossFunction
from funcpipe.training.stage_optimizer import OptimizerFactory
from funcpipe.training.verify import TOLERANCE, Verification, verify_states


class FuncPipe:
    """A module to be trained over functions.

    `loss_fn` takes the module's output and the targets and returns the mean over the samples it is given; None stands
    for a module that computes its own loss, which is the `loss` of its output. `optimizer` takes parameters and returns
    a torch optimiser, for example `partial(torch.optim.SGD, lr=0.1)`. Before each step the gradient of the whole model
    is scaled down to the norm `clip_grad_norm`, if it is larger. `blocks` are paths of modules that become one layer
    each, whatever is inside. Training updates `model`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        loss_fn: LossFunction | None = None,
        optimizer: OptimizerFactory,
        clip_grad_norm: float | None = None,
        name: str | None = None,
        blocks: Sequence[str] = (),
    ) -> None:
        self.model = model
        self.name = name or type(model).__name__
        self._loss = loss_fn or loss_of_output
        self._optimizer = optimizer
        self._clip_grad_norm = clip_grad_norm
        self._blocks = tuple(blocks)
        self._profile: ModelProfile | None = None
        self._spec: PlatformSpec | None = None
        self._plan: Plan | None = None

    def profile(
        self,
        sample_inputs: Tensor | tuple[Any, ...] | Mapping[str, Any] | list[Bucket],
        *,
        platform: str | PlatformSpec = "aws-lambda",
        micro_batch: int = 4,
        sample_target: Any = None,
        layers: int = PROFILED_LAYERS,
        repeats: int = REPEATS,
        on: Site | None = None,
        max_usd: float | None = None,
        progress: Callable[[str, float], None] | None = None,
    ) -> ModelProfile:
        """Measure the module's layers for micro-batches of `micro_batch` samples.

        They are timed in this process and scaled to the function sizes of `platform`; or, if an open site is given as
        `on`, in functions of every size of its platform, for at most `max_usd` dollars.

        `sample_inputs` are what the module is called with, by position or by name; with a `sample_target` the loss is
        measured too. For data of several lengths it is a list of Buckets. Each layer is timed `repeats` times, and more
        often on a machine that is busy with other work.
        Light neighbouring layers are merged until `layers` are left. Raises ModelError for a module that cannot be
        divided into layers.
        """
        chosen = platform if on is None else on.platform.spec
        spec = load_spec(chosen) if isinstance(chosen, str) else chosen
        measured = profile_buckets(
            self.model,
            buckets_of(sample_inputs, sample_target),
            loss=self._loss,
            blocks=self._blocks,
            on=on,
            max_usd=max_usd,
            spec=spec,
            micro_batch=micro_batch,
            repeats=repeats,
            progress=progress,
        )
        self._profile, self._spec = merge_layers(measured, layers), spec
        return self._profile

    def optimize(
        self,
        *,
        global_batch: int,
        time_value: float = 0.0,
        deadline_s: float | None = None,
        budget_usd: float | None = None,
        replicas: Sequence[int] | None = None,
        wire: Wire = Wire.FP32,
        recompute: Recompute = Recompute.AUTO,
        wire_back: Wire | None = None,
        schedule: ScheduleKind | None = None,
        sync: Sync | None = None,
        shard_optimizer: bool = False,
        pins: Pins = NO_PINS,
        policy: str = "funcpipe",
        solver: str = "auto",
        time_limit_s: float | None = None,
        profile: ModelProfile | None = None,
        spec: PlatformSpec | None = None,
    ) -> Plan:
        """The best plan for the profiled module: the cheapest one if an hour saved is worth `time_value` dollars.

        With `deadline_s` it is the cheapest whose iteration takes no longer, with `budget_usd` the fastest whose
        iteration costs no more. `pins` are decisions that the plan must follow. Unless `schedule` and `sync` are given,
        the best ones are chosen. Activations travel in the format `wire`, their gradients in `wire_back`, by default
        the same. `shard_optimizer` divides the optimiser's state over replicas. Raises Infeasible if no plan fits.
        """
        training = TrainingSpec(
            global_batch=global_batch,
            optimizer=optimizer_kind(self._optimizer),
            wire=wire,
            recompute=recompute,
            wire_back=wire_back,
            schedule=schedule,
            sync=sync,
            shard_optimizer=shard_optimizer,
            replicas=None if replicas is None else tuple(replicas),
            time_value=time_value,
            deadline_s=deadline_s,
            budget_usd=budget_usd,
        )
        measured, platform = self._profiled(profile, spec)
        self._plan = optimize(
            measured, platform, training, pins=pins, policy=policy, solver=solver, time_limit_s=time_limit_s
        )
        return self._plan

    def simulate(self, plan: Plan | None = None, *, disturbances: Disturbances = UNDISTURBED) -> Trace:
        """One iteration of the plan on a virtual clock, with `disturbances` such as noise, stragglers and failures."""
        clipped = self._clip_grad_norm is not None
        return predict(self._planned(plan), *self._profiled(None, None), disturbances=disturbances, clipped=clipped)

    def train(
        self,
        dataset: MapDataset | Callable[[], MapDataset],
        *,
        epochs: int = 1,
        platform: str = LOCAL,
        like: str | PlatformSpec | None = None,
        plan: Plan | None = None,
        seed: int = 0,
        shuffle: bool = True,
        faults: FaultTolerance = DEFAULT_FAULTS,
        limits: RunLimits = NO_LIMITS,
        settings: RunSettings = DEFAULT_SETTINGS,
        on_progress: Callable[[Progress], None] = ignore_progress,
        **keywords: Unpack[RunKeywords],
    ) -> RunResult:
        """Train the module over functions, as one process would, and load the result into it.

        `dataset` holds tuples of the module's inputs and, last, the target, or dictionaries of its arguments; or it is
        a factory of such a dataset, which is called inside the functions. On the local platform functions are as fast
        as this machine, and unlimited; `like` another platform they have its memory, processors, links and lifetime.
        Other platforms are what `funcpipe deploy` made, by URL: `aws-lambda://NAME?region=…`, `aliyun-fc://…`.

        `faults` says how the run copes with failures, `limits` what it may cost, `settings` what it is called and where
        its objects lie; each setting may be given by keyword (see `RunSettings`; `run` is the name). A run that is
        resumed goes on by whatever plan; if its functions still run, it is watched, as it was started.

        Raises PlanError, DataError, ModelError, PlatformRefused, RunTaken or RunUnknown before any function starts;
        WorkerFailed, RunHalted or DeadlineExceeded afterwards; RunInterrupted when Ctrl-C ends it, or ends watching.
        The module changes only if the run succeeds.
        """
        settings = settings_with(settings, keywords)
        order = SampleOrder(epochs=epochs, seed=seed, shuffle=shuffle)
        with open_session(platform, like, settings) as session:
            prepared = self._prepare(session, dataset, plan, order, faults=faults, limits=limits, settings=settings)
            result = launch(prepared, on_progress)
        load_tensors(self.model, result.tensors)
        write_attributes(self.model, result.attributes)
        return replace(result, tensors=saved_state(self.model))

    def start(
        self,
        dataset: MapDataset | Callable[[], MapDataset],
        *,
        epochs: int = 1,
        platform: str = LOCAL,
        like: str | PlatformSpec | None = None,
        plan: Plan | None = None,
        seed: int = 0,
        shuffle: bool = True,
        faults: FaultTolerance = DEFAULT_FAULTS,
        limits: RunLimits = NO_LIMITS,
        settings: RunSettings = DEFAULT_SETTINGS,
        **keywords: Unpack[RunKeywords],
    ) -> str:
        """Do what `train` does, but leave the run to itself once its functions are started; returns the run's name.

        On the local platform it needs a `storage`. `train` with `resume` watches it, and collects what it leaves.
        """
        settings = settings_with(settings, keywords)
        order = SampleOrder(epochs=epochs, seed=seed, shuffle=shuffle)
        with open_session(platform, like, settings, silent=True) as session:
            if not session.lasts:
                raise InvalidValue("storage", settings.storage, "must be given for a run that is left to itself")
            return launch_detached(
                self._prepare(session, dataset, plan, order, faults=faults, limits=limits, settings=settings)
            )

    def verify(
        self,
        dataset: MapDataset | Callable[[], MapDataset],
        *,
        steps: int = 3,
        plan: Plan | None = None,
        seed: int = 0,
        tolerance: float = TOLERANCE,
        message_deadline_s: float = DEFAULT_SETTINGS.message_deadline_s,
    ) -> Verification:
        """Train for `steps` steps over local functions and in one process, and compare; the module stays as it is.

        Raises what `train` raises.
        """
        settings, order = RunSettings(message_deadline_s=message_deadline_s), SampleOrder(seed=seed, steps=steps)
        with open_session(LOCAL, None, settings) as session:
            prepared = self._prepare(session, dataset, plan, order, settings=settings)
            job = prepared.job
            found = named_tensors(self.model) | launch(prepared).tensors
        plain = job.plain_training(self.model)
        return verify_states(job.graph, found, plain.run, steps=job.steps, tolerance=tolerance)

    def _prepare(
        self,
        session: Session,
        dataset: MapDataset | Callable[[], MapDataset],
        plan: Plan | None,
        order: SampleOrder,
        *,
        faults: FaultTolerance = DEFAULT_FAULTS,
        limits: RunLimits = NO_LIMITS,
        settings: RunSettings,
    ) -> PreparedRun:
        clip, blocks = self._clip_grad_norm, self._blocks
        learner = Learner(
            model=self.model, loss=self._loss, optimizer=self._optimizer, clip_grad_norm=clip, blocks=blocks
        )
        priced = replace(settings, prices=settings.prices or self._spec)
        return prepare_training(
            learner, dataset, self._planned(plan), order, session, faults=faults, limits=limits, settings=priced
        )

    def _profiled(self, profile: ModelProfile | None, spec: PlatformSpec | None) -> tuple[ModelProfile, PlatformSpec]:
        measured = profile or self._profile
        if measured is None:
            raise PlanError("there is no profile yet; call profile() first, or give one")
        return measured, spec or self._spec or load_spec(measured.platform)

    def _planned(self, plan: Plan | None) -> Plan:
        chosen = plan or self._plan
        if chosen is None:
            raise PlanError("there is no plan yet; call optimize() first, or give one")
        return chosen
