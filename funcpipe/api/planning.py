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
from funcpipe.client.prepare.session import Site
from funcpipe.core import (
    DEFAULT_STORES,
    NO_PINS,
    Coupled,
    ModelProfile,
    Numerics,
    Pins,
    Plan,
    PlatformSpec,
    Recompute,
    ScheduleKind,
    Stores,
    Sync,
    TrainingSpec,
    Wire,
)
from funcpipe.partitioner import PROFILED_LAYERS
from funcpipe.platforms.catalog import profiled_spec
from funcpipe.profiler import REPEATS
from funcpipe.training.data_source import Data
from funcpipe.training.instances import instances_of
from funcpipe.training.losses import LossFunction, loss_of_output
from funcpipe.training.optimizers import OptimizerFactory, trainable_shapes
from funcpipe.training.recipe import RecipeKeywords, check_precision, no_optimizer, recipe_with
from funcpipe.training.recipe_trial import check_for_model, optimizer_kind
from funcpipe.worker.deferred_compiler import CompilerDeferred

if TYPE_CHECKING:
    from funcpipe.client.prepare.profiling import SampleInputs
    from funcpipe.client.prepare.weights import WeightSource


class Planning:
    """A module with its loss and its optimiser, its profile and its plan; `FuncPipe` says what they are."""

    @arguments.strict
    @CompilerDeferred()
    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        *,
        loss_fn: LossFunction | None = None,
        optimizer: OptimizerFactory | Optimizer = no_optimizer,
        name: str | None = None,
        weights: "WeightSource | None" = None,
        blocks: Sequence[str] = (),
        compile: bool = False,
        **learning: Unpack[RecipeKeywords],
    ) -> None:
        self._weights = None
        if weights is not None:
            model, self._weights = arguments.opened(model, weights)
        model = arguments.learner(model, loss_fn=loss_fn, blocks=blocks)
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

        They are timed in this process and scaled to the function sizes of a platform, or timed in functions (`on`).

        Args:
            sample_inputs: What the module is called with, by position or by name. For data of several lengths, a list
                of Buckets; where the first dimension is not the batch, the DataLoader, whose largest micro-batch of
                some is taken.
            platform: The platform that the plan is for, by name or by its specification.
            micro_batch: The samples that a function computes on at once.
            sample_target: With a target, the loss is measured too.
            layers: Light layers are merged until so many are left.
            repeats: Layers are timed so often, and more often on a busy machine. With 0 they are not timed: seconds
                follow from their operations and bytes, by the rates of this machine's processor.
            dataset: With the dataset for `train`, loading is measured too.
            on: An open site: layers are timed in functions of every size of its platform.
            max_usd: The most that these functions may cost, in dollars.
            progress: Is called with what is measured and the part that is done.

        Raises:
            ModelError: The model cannot be divided.
            DataError: The inputs cannot be cut into micro-batches.
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
    @CompilerDeferred()
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
        sync_every: int | str = 1,
        sync_every_at_most: int | None = None,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        sync_fragments: int = 1,
        sync_delay: int = 0,
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
        """Return the best plan for the profiled module, and keep it for the other verbs.

        It is the cheapest one if an hour saved is worth `time_value` dollars.

        Args:
            global_batch: The samples of a step.
            time_value: The dollars that an hour saved is worth.
            deadline_s: Instead, take the cheapest plan whose iteration takes no longer.
            budget_usd: Instead, take the fastest plan whose iteration costs no more.
            replicas: The numbers of copies of each stage that may be chosen.
            wire: The format in which activations travel.
            recompute: Stages keep what backwards need, or compute it again; by default, whatever is best.
            wire_back: The format in which the gradients of activations travel, by default `wire`.
            wire_sync: The format in which the gradients that replicas sum travel.
            numerics: With "bf16", all that is not asked to travel in 16 bits may travel in bf16; with "int8", in 8 bits
                besides.
            schedule: The order of forwards and backwards, by default the best one.
            sync: The way in which replicas sum gradients, by default the best one.
            sync_every: Replicas train alone and meet after so many steps. With "end" they meet in the end alone, with
                "auto" after the best number of at most `sync_every_at_most`.
            sync_every_at_most: With "auto", the most steps between meetings.
            outer_lr: When replicas meet, they go so far to their mean.
            outer_momentum: The Nesterov momentum with which they do.
            sync_fragments: The parameters of each stage meet in so many parts, at different steps of a round.
            sync_delay: What replicas meet on reaches them so many steps later, and travels while they train.
            shard_optimizer: Divide the optimiser's state over replicas.
            stores: Where messages, sums and checkpoints may be: "default", "auto", or names by kind, `{"messages":
                "express"}`; `train` then takes a URL for each.
            pins: Decisions that the plan must follow.
            policy: The search of funcpipe, or the rule of another system, for comparison.
            solver: The exact search, or a solver of mixed-integer programs.
            time_limit_s: The seconds after which the search ends with the best plan so far.
            simulated_plans: Simulate so many of the best plans, and take the best of them.
            profile: A profile that was read from a file.
            spec: The platform, by default the profile's.

        Raises:
            Infeasible: No plan fits.
        """
        from funcpipe.analysis.improve import best_simulated
        from funcpipe.client.prepare.one_stage import search
        from funcpipe.partitioner.optimize import optimize

        training = TrainingSpec(
            **self._trained_by(),
            global_batch=global_batch,
            **choices(wire=wire, wire_back=wire_back, wire_sync=wire_sync, numerics=numerics),
            **choices(recompute=recompute, schedule=schedule, sync=sync),
            sync_every=sync_every,
            sync_every_at_most=sync_every_at_most,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            sync_fragments=sync_fragments,
            sync_delay=sync_delay,
            shard_optimizer=shard_optimizer,
            stores=Stores.of(stores),
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

    def _trained_by(self) -> dict[str, Any]:
        """The fields of a TrainingSpec that follow from the optimiser, an average and the loss."""
        return {
            "optimizer": optimizer_kind(self._recipe.optimizer, trainable_shapes(self.model, self._recipe.loss)),
            "averaged": self._recipe.average is not None,
            "joint_loss": self._recipe.coupled is Coupled.CACHE,
        }

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
        """Return the best plan for `evaluate` and `predict`, which run forwards alone; it is not kept for `train`.

        No gradients and no optimiser's state take memory, and nothing is summed over replicas. Arguments that are not
        listed are those of `optimize`.

        Args:
            global_batch: The samples of a batch.

        Raises:
            Infeasible: No plan fits.
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

    def _profiled(self, profile: ModelProfile | None, spec: AnySpec | None) -> tuple[ModelProfile, PlatformSpec]:
        measured = given("profile", profile or self._profile, ModelProfile)
        check_precision("profile", measured.precision, self._recipe)
        named = spec or self._spec
        return measured, spec_of(named) if named else profiled_spec(measured)

    def _planned(self, plan: Plan | None) -> Plan:
        return given("plan", plan or self._plan, Plan)
