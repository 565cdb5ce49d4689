"""What is to be trained."""

from collections.abc import Callable
from dataclasses import dataclass

from funcpipe.core import FaultTolerance, Plan, PlatformSpec, RunLimits, checks
from funcpipe.errors import PlanError
from funcpipe.model.graph import LayerGraph
from funcpipe.training.data import Batches, MapDataset
from funcpipe.training.passes import LossFunction
from funcpipe.training.stage_optimizer import OptimizerFactory

DEFAULT_FAULTS = FaultTolerance()
NO_LIMITS = RunLimits()


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be trained, on what, and for how long.

    `dataset` is called in every function that reads data. `prices` is the platform whose prices the bill is made with:
    the one that the plan was made for.
    """

    graph: LayerGraph
    plan: Plan
    loss: LossFunction
    optimizer: OptimizerFactory
    dataset: Callable[[], MapDataset]
    samples: int
    epochs: int
    seed: int
    shuffle: bool
    message_deadline_s: float
    prices: PlatformSpec
    clip_grad_norm: float | None = None

    def __post_init__(self) -> None:
        if self.clip_grad_norm is not None:
            checks.positive("clip_grad_norm", self.clip_grad_norm)
            if self.plan.is_sharded:
                raise PlanError(
                    "the plan divides the optimiser over replicas, each of which updates its split before the norm of "
                    "the whole gradient is known; train without clip_grad_norm, or plan without shard_optimizer"
                )
        _ = self.batches  # which checks that the data is enough

    @property
    def batches(self) -> Batches:
        """How the samples are dealt out over steps."""
        return Batches(
            samples=self.samples,
            global_batch=self.plan.global_batch,
            micro_batch=self.plan.micro_batch,
            seed=self.seed,
            shuffle=self.shuffle,
        )

    @property
    def steps(self) -> int:
        """Training steps of all epochs."""
        return self.epochs * self.batches.steps_per_epoch
