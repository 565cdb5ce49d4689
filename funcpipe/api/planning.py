"""The planning verbs: profile, optimize, simulate, estimate, provision.

What a verb alone needs is imported when it is called: `train` with a plan does without profiler, search and simulator.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack, cast

from torch import nn
from torch.optim import Optimizer

from funcpipe.client.prepare import arguments
from funcpipe.client.prepare.arguments import AnySpec, choices, given, spec_of
from funcpipe.client.prepare.data import open_data
from funcpipe.client.prepare.job_estimate import estimate_job
from funcpipe.client.prepare.job_shape import job_shape
from funcpipe.client.prepare.session import Site, estimated_prices
from funcpipe.core import (
    DEFAULT_STORES,
    NO_PINS,
    Coupled,
    FaultTolerance,
    JobEstimate,
    ModelProfile,
    Numerics,
    Pins,
    Plan,
    PlatformSpec,
    Recompute,
    ScheduleKind,
    Stores,
    Sync,
    Trace,
    TrainingSpec,
    Validation,
    Wire,
)
from funcpipe.core.loss_model import LossModel
from funcpipe.core.market import Market
from funcpipe.core.provision import JobSpec, ProvisionTable
from funcpipe.core.settings import DEFAULT_FAULTS
from funcpipe.partitioner import PROFILED_LAYERS
from funcpipe.profiler import REPEATS
from funcpipe.scheduler.simulator.disturbances import UNDISTURBED, Disturbances
from funcpipe.training.data_source import Data
from funcpipe.training.instances import instances_of
from funcpipe.training.losses import LossFunction, loss_of_output
from funcpipe.training.optimizers import OptimizerFactory, trainable_shapes
from funcpipe.training.recipe import RecipeKeywords, check_precision, no_optimizer, recipe_with
from funcpipe.training.recipe_trial import check_for_model, optimizer_kind
from funcpipe.worker.deferred_compiler import CompilerDeferred

if TYPE_CHECKING:
    from funcpipe.client.prepare.profiling import SampleInputs


class Planning:
    """A module with its loss and its optimiser, its profile and its plan; `FuncPipe` says what they are."""

    @arguments.strict
    @CompilerDeferred()
    def __init__(
        self,
        model: nn.Module,
        *,
        loss_fn: LossFunction | None = None,
        optimizer: OptimizerFactory | Optimizer = no_optimizer,
        name: str | None = None,
        blocks: Sequence[str] = (),
        compile: bool = False,
        **learning: Unpack[RecipeKeywords],
    ) -> None:
        arguments.check_learner(model, loss_fn=loss_fn, blocks=blocks)
        arguments.check_eager(model, loss_fn, compile=compile)
        self.model = model
        self.name = name or type(model).__name__
        loss = loss_fn or loss_of_output
        self._made = made = instances_of(model, loss, optimizer, learning.get("scheduler"))
        if made is not None and made.make_scheduler is not None:
            learning |= {"scheduler": made.make_scheduler}
        self._recipe = recipe_with(loss, cast(OptimizerFactory, optimizer) if made is None else made.make, learning)
        check_for_model(self._recipe, model)
        self._blocks, self._logged_notes = tuple(blocks), set[str]()
        self._profile: ModelProfile | None = None
        self._spec: PlatformSpec | None = None
        self._plan: Plan | None = None

    @arguments.strict
    @CompilerDeferred()
    def profile(
        self,
        sample_inputs: "SampleInputs",
        *,
        platform: str | PlatformSpec = "aws-lambda",
        micro_batch: int = 4,
        sample_target: Any = None,
        layers: int = PROFILED_LAYERS,
        repeats: int = REPEATS,
        dataset: Data | None = None,
        on: Site | None = None,
        max_usd: float | None = None,
        progress: Callable[[str, float], None] | None = None,
    ) -> ModelProfile:
        """Measure the module's layers for micro-batches of `micro_batch` samples.

        They are timed in this process and scaled to the function sizes of `platform`; or, if an open site is given as
        `on`, in functions of every size of its platform, for at most `max_usd` dollars.

        `sample_inputs` are what the module is called with, by position or by name; with a `sample_target` the loss is
        measured too. For data of several lengths it is a list of Buckets; where the first dimension is not the batch,
        the DataLoader, whose largest micro-batch of some is taken. Layers are timed `repeats` times, and more often on
        a busy machine. With the `dataset` for `train`, loading is measured too. Light layers are merged until `layers`
        are left. Raises ModelError or DataError for what cannot be divided or cut.
        """
        from funcpipe.client.prepare.profiling import profile_data, profile_inputs
        from funcpipe.partitioner.problem.cuts import merge_layers

        arguments.check_profiling(sample_inputs, on, micro_batch=micro_batch, repeats=repeats, layers=layers)
        spec = spec_of(platform if on is None else on.platform.spec)
        measured = profile_inputs(
            self.model,
            sample_inputs,
            sample_target,
            recipe=self._recipe,
            blocks=self._blocks,
            logged_notes=self._logged_notes,
            on=on,
            max_usd=max_usd,
            spec=spec,
            micro_batch=micro_batch,
            repeats=repeats,
            progress=progress,
        )
        data = None if dataset is None else profile_data(dataset, micro_batch)
        self._profile, self._spec = replace(merge_layers(measured, layers), data=data), spec
        return self._profile

    @arguments.strict
    def optimize(
        self,
        *,
        global_batch: int,
        time_value: float = 0.0,
        deadline_s: float | None = None,
        budget_usd: float | None = None,
        replicas: Sequence[int] | int | None = None,
        wire: Wire | str = Wire.FP32,
        recompute: Recompute | str = Recompute.AUTO,
        wire_back: Wire | str | None = None,
        wire_sync: Wire | str = Wire.FP32,
        numerics: Numerics | str = Numerics.EXACT,
        schedule: ScheduleKind | str | None = None,
        sync: Sync | str | None = None,
        shard_optimizer: bool = False,
        stores: Stores | str | Mapping[str, str] = DEFAULT_STORES,
        pins: Pins = NO_PINS,
        policy: str = "funcpipe",
        solver: str = "auto",
        time_limit_s: float | None = None,
        simulated_plans: int = 0,
        profile: ModelProfile | None = None,
        spec: AnySpec | None = None,
    ) -> Plan:
        """The best plan for the profiled module: the cheapest one if an hour saved is worth `time_value` dollars.

        With `deadline_s` it is the cheapest whose iteration takes no longer, with `budget_usd` the fastest whose
        iteration costs no more. `pins` are decisions that the plan must follow. Unless `schedule` and `sync` are given,
        the best ones are chosen. Activations travel in the format `wire`, their gradients in `wire_back`, by default
        the same, and the gradients that replicas sum in `wire_sync`; with `numerics` "bf16", all that is not asked to
        travel in 16 bits may travel in bf16, and with "int8" in 8 bits besides. `shard_optimizer` divides the
        optimiser's state over replicas. `stores` says where messages, sums and checkpoints may be: "default", "auto",
        or names by kind, {"messages": "express"}; `train` then takes a URL for each. With `simulated_plans`, so many of
        the best plans are simulated, and the best of them is taken. Raises Infeasible if no plan fits.
        """
        from funcpipe.analysis.improve import best_simulated
        from funcpipe.client.prepare.one_stage import search
        from funcpipe.partitioner.optimize import optimize

        training = TrainingSpec(
            global_batch=global_batch,
            optimizer=optimizer_kind(self._recipe.optimizer, trainable_shapes(self.model, self._recipe.loss)),
            **choices(wire=wire, wire_back=wire_back, wire_sync=wire_sync, numerics=numerics),
            **choices(recompute=recompute, schedule=schedule, sync=sync),
            shard_optimizer=shard_optimizer,
            stores=Stores.of(stores),
            averaged=self._recipe.average is not None,
            joint_loss=self._recipe.coupled is Coupled.CACHE,
            replicas=arguments.counts(replicas),
            time_value=time_value,
            deadline_s=deadline_s,
            budget_usd=budget_usd,
        )
        arguments.check_planning(pins, time_limit_s, simulated_plans, policy, solver)
        way = partial(optimize, policy=policy, solver=solver)
        if simulated_plans:
            way = partial(best_simulated, count=simulated_plans, clipped=self._recipe.exchanges_norms)
        self._plan = search(self._recipe, self.model, way, *self._profiled(profile, spec), training, pins, time_limit_s)
        return self._plan

    @arguments.strict
    def optimize_forward(
        self,
        *,
        global_batch: int,
        time_value: float = 0.0,
        deadline_s: float | None = None,
        budget_usd: float | None = None,
        replicas: Sequence[int] | int | None = None,
        wire: Wire | str = Wire.FP32,
        profile: ModelProfile | None = None,
        spec: AnySpec | None = None,
    ) -> Plan:
        """The best plan for `evaluate` and `predict`, which run forwards alone, in batches of `global_batch` samples.

        No gradients and no state of an optimiser take memory, and nothing is summed over replicas. The other arguments
        are those of `optimize`. The plan is not kept for `train`. Raises Infeasible if no plan fits.
        """
        from funcpipe.partitioner.optimize import optimize
        from funcpipe.partitioner.problem.goal import forward_only

        measured, platform = self._profiled(profile, spec)
        wanted = TrainingSpec(
            global_batch=global_batch,
            **choices(wire=wire),
            recompute=Recompute.NEVER,
            replicas=arguments.counts(replicas),
            time_value=time_value,
            deadline_s=deadline_s,
            budget_usd=budget_usd,
        )
        return optimize(forward_only(measured), platform, wanted)

    @arguments.strict
    def simulate(self, plan: Plan | None = None, *, disturbances: Disturbances = UNDISTURBED) -> Trace:
        """One iteration of the plan on a virtual clock, with `disturbances` such as noise, stragglers and failures."""
        from funcpipe.analysis.predict import predict

        clipped = self._recipe.exchanges_norms
        return predict(self._planned(plan), *self._profiled(None, None), disturbances=disturbances, clipped=clipped)

    @arguments.strict
    def estimate(
        self,
        data: int | Data,
        *,
        epochs: int = 1,
        platform: str | PlatformSpec | None = None,
        plan: Plan | None = None,
        faults: FaultTolerance = DEFAULT_FAULTS,
        prices: PlatformSpec | None = None,
        validation: Validation | Data | None = None,
    ) -> JobEstimate:
        """The expected seconds and dollars of training on `data`, or on so many samples, item by item.

        Functions start and end as those of `platform`, by default the plan's; of a deployment's URL, in its region.
        With `validation` it is validated meanwhile. Starts nothing. Raises PlanError for a plan without an estimate.
        """
        chosen = self._planned(plan)
        shape = job_shape(chosen, data, epochs, validation, model=self.model, averaged=self._recipe.average is not None)
        priced = estimated_prices(platform, chosen, given=prices, planned=self._spec)
        return estimate_job(chosen, shape, prices=priced, faults=faults, functions=platform)

    @arguments.strict
    def provision(
        self,
        data: int | Data,
        *,
        global_batch: int,
        epochs: float | None = None,
        target_loss: float | None = None,
        loss: LossModel | None = None,
        deadline_s: float | None = None,
        budget_usd: float | None = None,
        miss_chance: float = 0.05,
        market: Market | str = "aws",
        ways: Sequence[str] | None = None,
        count_server: bool = False,
        faults: FaultTolerance = DEFAULT_FAULTS,
        profile: ModelProfile | None = None,
        spec: AnySpec | None = None,
    ) -> ProvisionTable:
        """All ways to train on `data`, or on so many samples: functions and machines, seconds, dollars, which to take.

        The goal is a number of `epochs`, or a `target_loss` with a `loss` model (see `funcpipe provision fit-loss`);
        deadline and budget are those of the whole job. `market` holds the machines, by name or from a file. With `ways`
        only those of these names are compared. Rents nothing.
        """
        from funcpipe.neighbours.history.filing import filed
        from funcpipe.neighbours.provisioning.compare import provision_table

        measured, platform = self._profiled(profile, spec)
        job = JobSpec(
            samples=data if isinstance(data, int) else len(open_data(data)[1].dataset),
            global_batch=global_batch,
            epochs=epochs,
            target_loss=target_loss,
            deadline_s=deadline_s,
            budget_usd=budget_usd,
            miss_chance=miss_chance,
        )
        kind = optimizer_kind(self._recipe.optimizer, trainable_shapes(self.model, self._recipe.loss))
        training = TrainingSpec(global_batch=global_batch, optimizer=kind, averaged=self._recipe.average is not None)
        table = provision_table(
            measured,
            job,
            spec=platform,
            market=market,
            loss=loss,
            training=training,
            count_server=count_server,
            faults=faults,
            ways=ways,
        )
        return filed(table)

    def _profiled(self, profile: ModelProfile | None, spec: AnySpec | None) -> tuple[ModelProfile, PlatformSpec]:
        measured = given("profile", profile or self._profile, ModelProfile)
        check_precision("profile", measured.precision, self._recipe)
        return measured, spec_of(spec or self._spec or measured.platform)

    def _planned(self, plan: Plan | None) -> Plan:
        return given("plan", plan or self._plan, Plan)
