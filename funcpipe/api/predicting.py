"""What a plan, or any other way to train, would take and cost: said before a cent is spent."""

from collections.abc import Sequence

from funcpipe.api.planning import Planning
from funcpipe.client.prepare import arguments
from funcpipe.client.prepare.arguments import AnySpec
from funcpipe.client.prepare.data import open_data
from funcpipe.client.prepare.job_estimate import estimate_job
from funcpipe.client.prepare.job_shape import job_shape
from funcpipe.client.prepare.session import estimated_prices
from funcpipe.core import (
    FaultTolerance,
    JobEstimate,
    ModelProfile,
    Plan,
    PlatformSpec,
    Trace,
    TrainingSpec,
    Validation,
)
from funcpipe.core.loss_model import LossModel
from funcpipe.core.market import Market
from funcpipe.core.provision import JobSpec, ProvisionTable
from funcpipe.core.settings import DEFAULT_FAULTS
from funcpipe.scheduler.simulator.disturbances import UNDISTURBED, Disturbances
from funcpipe.training.data_source import Data
from funcpipe.training.optimizers import trainable_shapes
from funcpipe.training.recipe_trial import optimizer_kind
from funcpipe.worker.deferred_compiler import CompilerDeferred


class Predicting(Planning):
    """A module whose training is predicted; `FuncPipe` says what it is made of."""

    @arguments.strict
    def simulate(self, plan: Plan | None = None, *, disturbances: Disturbances = UNDISTURBED) -> Trace:
        """Return one iteration of a plan on a virtual clock; if replicas train alone, one that ends with a meeting.

        Args:
            plan: The plan, by default the last one of `optimize`.
            disturbances: Noise, stragglers, failures.
        """
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
        """Return the expected seconds and dollars of a whole training, item by item. Starts nothing.

        Args:
            data: The data, or its number of samples.
            epochs: How often training goes over it.
            platform: Functions start and end as those of this platform, by default the plan's; of a deployment's URL,
                in its region.
            plan: The plan, by default the last one of `optimize`.
            faults: As in `train`.
            prices: The prices, by default the platform's.
            validation: As in `train`.

        Raises:
            PlanError: The plan has no estimate.
        """
        chosen = self._planned(plan)
        shape = job_shape(chosen, data, epochs, validation, model=self.model, averaged=self._recipe.average is not None)
        priced = estimated_prices(platform, chosen, given=prices, planned=self._spec)
        return estimate_job(chosen, shape, prices=priced, faults=faults, functions=platform)

    @arguments.strict
    @CompilerDeferred()
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
        """Return all ways to train on functions and machines, their seconds and dollars, and the one to take. Rents
        nothing.

        Args:
            data: The data, or its number of samples.
            global_batch: The samples of a step.
            epochs: The goal: so many epochs.
            target_loss: Or the goal: this loss, by the model of `loss`.
            loss: How the loss falls with steps (see `funcpipe provision fit-loss`).
            deadline_s: The seconds that the whole job may take.
            budget_usd: The dollars that the whole job may cost.
            miss_chance: The chance of missing the deadline that may be taken, where spot machines can go away.
            market: The machines and their prices, by name or from a file.
            ways: Compare only those of these names.
            count_server: λDNN and spotDNN count the parameter server when they search, which their papers leave out;
                the bill always does.
            faults: As in `train`.
            profile: A profile that was read from a file.
            spec: The platform of functions, by default the profile's.
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
