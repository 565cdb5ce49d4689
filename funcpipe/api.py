"""An ordinary module, its loss and its optimiser, with the verbs around them: profile, optimize, simulate, train."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from funcpipe.client.job import Care, Job
from funcpipe.client.launch import NO_CARE
from funcpipe.client.results import Progress, RunResult
from funcpipe.client.session import ANYWHERE, Earlier, Place, go_back, place_of, run_job, start_job
from funcpipe.client.site import Site
from funcpipe.core import ModelProfile, Plan, PlatformSpec, Recompute, ScheduleKind, Sync, Trace, TrainingSpec, Wire
from funcpipe.errors import PlanError
from funcpipe.model.graph import trace
from funcpipe.partitioner.catalog import PROFILED_LAYERS
from funcpipe.partitioner.optimize import optimize
from funcpipe.partitioner.problem.merge import merge_layers
from funcpipe.partitioner.problem.pins import NO_PINS, Pins
from funcpipe.platforms.catalog import LOCAL, load_spec
from funcpipe.profiler import REPEATS, profile
from funcpipe.report.predict import predict
from funcpipe.scheduler.simulator.disturbances import Disturbances
from funcpipe.scheduler.simulator.simulate import UNDISTURBED
from funcpipe.training.adapters import Holder, LossOn, arguments_of, optimizer_kind, own_loss
from funcpipe.training.computation import LossFunction, OptimizerFactory
from funcpipe.training.data import MapDataset, load
from funcpipe.training.verify import TOLERANCE, Verification, compare_states, train_in_one_process


class FuncPipe:
    """A module to be trained over functions.

    `loss_fn` takes the module's output and the targets and returns the mean over the samples it is given; None stands
    for a module that computes its own loss, which is the `loss` of its output. `optimizer` takes parameters and returns
    a torch optimiser, for example `partial(torch.optim.SGD, lr=0.1)`. Before each step the whole model's gradient is
    scaled down to `clip_grad_norm`, if its norm is more. Training updates `model`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        loss_fn: LossFunction | None = None,
        optimizer: OptimizerFactory,
        clip_grad_norm: float | None = None,
        name: str | None = None,
    ) -> None:
        self.model = model
        self.name = name or type(model).__name__
        self._loss = loss_fn or own_loss
        self._optimizer = optimizer
        self._clip_grad_norm = clip_grad_norm
        self._profile: ModelProfile | None = None
        self._spec: PlatformSpec | None = None
        self._plan: Plan | None = None

    def profile(
        self,
        sample_inputs: Tensor | tuple[Any, ...] | Mapping[str, Any],
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

        That is done in this process, and scaled to the sizes of `platform`; or, with `on` an open site, in functions of
        every size of its platform, for at most `max_usd`.

        `sample_inputs` are what the module is called with, by position or by name; with `sample_target` the loss is
        measured too. Each layer is timed `repeats` times, more on a machine whose speed others disturb. Light
        neighbouring layers are folded together until `layers` are left. Raises ModelError for a module that cannot be
        turned into layers.
        """
        chosen = platform if on is None else on.platform.spec
        spec = load_spec(chosen) if isinstance(chosen, str) else chosen
        sample, named = arguments_of(sample_inputs)
        target_loss = None if sample_target is None else LossOn(self._loss, sample_target)
        graph = trace(self.model, sample, named)
        with on.timing(max_usd=max_usd) if on is not None else contextlib.nullcontext() as timing:
            measured = profile(
                graph,
                sample,
                named,
                spec=spec,
                micro_batch=micro_batch,
                loss=target_loss,
                repeats=repeats,
                progress=progress,
                on=timing,
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
        """The best plan for the profiled module: cheapest if a saved hour is worth `time_value` dollars.

        Or the cheapest iteration within `deadline_s`, or the fastest within `budget_usd`; `pins` are decisions that
        the plan must follow. Without a `schedule` or a `sync` the plan has the best one. Activations travel as
        `wire` says, their gradients as `wire_back` or else alike. `shard_optimizer` divides the optimiser's state
        over replicas. Raises Infeasible when no plan fits.
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
        """One iteration of the plan on a virtual clock, under `disturbances` such as noise, stragglers and deaths."""
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
        prices: PlatformSpec | None = None,
        seed: int = 0,
        shuffle: bool = True,
        message_deadline_s: float = 300.0,
        care: Care = NO_CARE,
        storage: str | None = None,
        run: str | None = None,
        resume: str | None = None,
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> RunResult:
        """Train the module over functions, as one process would, and load the result into it.

        `dataset` holds tuples of the module's inputs and, last, the target, or dictionaries of its arguments; or it is
        a factory of such a dataset, which is called inside the functions. On the local platform functions are as fast
        as this machine, and unlimited; `like` another platform they have its memory, processors, links and lifetime.
        Other platforms are what `funcpipe deploy` made, by URL: `aws-lambda://NAME?region=…`, `aliyun-fc://…`.
        The bill is made with `prices`, by default those of the plan's platform. A message that does not come within
        `message_deadline_s` ends the run. `care` says how workers live and what follows when they die. Objects lie in
        `storage`, a URL, by default a temporary folder; the new run is called `run`, or the run `resume` of that
        storage is gone on with, by whatever plan. Raises PlanError, DataError or ModelError before any function starts,
        WorkerFailed, RunHalted or DeadlineExceeded afterwards.
        """
        place = place_of(platform, like, storage=storage, run=run, resume=resume)
        earlier = go_back(self.model, place)
        job = self._job(dataset, plan, prices, message_deadline_s, epochs=epochs, seed=seed, shuffle=shuffle)
        result = self._run(job, on_progress, place, care, earlier)
        self.model.load_state_dict(result.state_dict())
        return result

    def start(
        self,
        dataset: MapDataset | Callable[[], MapDataset],
        *,
        storage: str,
        epochs: int = 1,
        platform: str = LOCAL,
        like: str | PlatformSpec | None = None,
        plan: Plan | None = None,
        prices: PlatformSpec | None = None,
        seed: int = 0,
        shuffle: bool = True,
        message_deadline_s: float = 300.0,
        care: Care = NO_CARE,
        run: str | None = None,
        resume: str | None = None,
    ) -> str:
        """Do what `train` does, but leave the run to itself once its functions are started; the run's name.

        `train` with `resume` waits for it, and collects what it leaves.
        """
        place = place_of(platform, like, storage=storage, run=run, resume=resume)
        earlier = go_back(self.model, place)
        job = self._job(dataset, plan, prices, message_deadline_s, epochs=epochs, seed=seed, shuffle=shuffle)
        return start_job(job, place, care, earlier)

    def verify(
        self,
        dataset: MapDataset | Callable[[], MapDataset],
        *,
        steps: int = 3,
        plan: Plan | None = None,
        seed: int = 0,
        tolerance: float = TOLERANCE,
        message_deadline_s: float = 300.0,
    ) -> Verification:
        """Train for `steps` steps over local functions and in one process, and compare; the module stays as it is.

        Raises what `train` raises.
        """
        job = self._job(dataset, plan, None, message_deadline_s, epochs=1, seed=seed, shuffle=True, steps=steps)
        expected = train_in_one_process(
            self.model,
            job.graph,
            job.dataset(),
            job.batches.epoch(0),
            loss=self._loss,
            optimizer=self._optimizer,
            seed=seed,
            clip_grad_norm=self._clip_grad_norm,
        )
        found = self._run(job).state_dict()
        return compare_states(job.graph, found, dict(expected.state_dict()), steps=job.steps, tolerance=tolerance)

    def _job(
        self,
        dataset: MapDataset | Callable[[], MapDataset],
        plan: Plan | None,
        prices: PlatformSpec | None,
        message_deadline_s: float,
        *,
        epochs: int,
        seed: int,
        shuffle: bool,
        steps: int | None = None,
    ) -> Job:
        """What is to be run, checked; with `steps`, on no more samples than so many steps take."""
        chosen = self._planned(plan)
        factory = dataset if callable(dataset) else Holder(dataset)
        made = factory()
        first = load(made, range(min(chosen.micro_batch, len(made))))
        return Job(
            graph=trace(self.model, first.args, first.kwargs),
            plan=chosen,
            loss=self._loss,
            optimizer=self._optimizer,
            dataset=factory,
            samples=len(made) if steps is None else min(len(made), steps * chosen.global_batch),
            epochs=epochs,
            seed=seed,
            shuffle=shuffle,
            message_deadline_s=message_deadline_s,
            prices=prices or self._spec or load_spec(chosen.platform),
            clip_grad_norm=self._clip_grad_norm,
        )

    def _run(
        self,
        job: Job,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        place: Place = ANYWHERE,
        care: Care = NO_CARE,
        earlier: Earlier | None = None,
    ) -> RunResult:
        result = run_job(job, place, care, earlier, on_progress)
        untouched = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        return replace(result, tensors=untouched | result.tensors)

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
