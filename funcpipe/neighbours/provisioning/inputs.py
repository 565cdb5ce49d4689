"""The ways to rent for a whole job, with our own plans priced by the job estimate."""

from collections.abc import Callable, Sequence

from funcpipe.client.prepare.job_estimate import estimate_job
from funcpipe.client.prepare.job_shape import JobShape
from funcpipe.core import FaultTolerance, JobEstimate, ModelProfile, Plan, PlatformSpec, TrainingSpec
from funcpipe.core.loss_model import LossModel
from funcpipe.core.market import Market
from funcpipe.core.provision import JobSpec, ProvisionTable
from funcpipe.core.settings import DEFAULT_FAULTS
from funcpipe.neighbours.provisioning.compare import Inputs, compare
from funcpipe.platforms.catalog import load_spec
from funcpipe.platforms.machine_catalog import load_market


def provision_inputs(
    profile: ModelProfile,
    job: JobSpec,
    *,
    spec: PlatformSpec | None = None,
    market: Market | str = "aws",
    loss: LossModel | None = None,
    training: TrainingSpec | None = None,
    count_server: bool = False,
    faults: FaultTolerance = DEFAULT_FAULTS,
) -> Inputs:
    """The inputs of all ways; `spec` is by default the profile's platform, `market` may be a name or a file."""
    platform = spec or load_spec(profile.platform)
    return Inputs(
        profile=profile,
        spec=platform,
        market=load_market(market) if isinstance(market, str) else market,
        job=job,
        estimate=_estimator(job, platform, faults),
        training=training or TrainingSpec(global_batch=job.global_batch),
        loss=loss,
        count_server=count_server,
    )


def provision_table(
    profile: ModelProfile,
    job: JobSpec,
    *,
    spec: PlatformSpec | None = None,
    market: Market | str = "aws",
    loss: LossModel | None = None,
    training: TrainingSpec | None = None,
    count_server: bool = False,
    faults: FaultTolerance = DEFAULT_FAULTS,
    ways: Sequence[str] | None = None,
) -> ProvisionTable:
    """Every way to do `job`, on functions and on machines: seconds, dollars, the chance to miss, the one to take.

    `loss` says how long a target loss takes (`funcpipe fit-loss`). `training` says how FuncPipe trains: formats,
    optimiser, replicas. With `ways`, only those of these names are compared. With `count_server`, λDNN and spotDNN
    count the parameter server when they search, which their papers leave out; the bill always does. Raises InvalidValue
    for an unknown way, market or platform.
    """
    inputs = provision_inputs(
        profile, job, spec=spec, market=market, loss=loss, training=training, count_server=count_server, faults=faults
    )
    return compare(inputs, ways)


def _estimator(job: JobSpec, spec: PlatformSpec, faults: FaultTolerance) -> Callable[[Plan, int], JobEstimate]:
    def estimate(plan: Plan, steps: int) -> JobEstimate:
        epochs = max(1, round(steps * job.global_batch / job.samples))
        return estimate_job(plan, JobShape(epochs=epochs, steps=steps), faults=faults, prices=spec)

    return estimate
