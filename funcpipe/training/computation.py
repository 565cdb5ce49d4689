"""All that one replica of one stage computes in a training step, task by task.

The passes add up gradients; `flat` sums them over replicas, `tied` over stages that share parameters; `norm` is that of
the whole model; the optimiser and the running statistics take their step with the sums. Every order of tasks that the
graph of the step allows gives the same bits.
"""

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from funcpipe.comm.collectives import Pattern
from funcpipe.core import TieRoute
from funcpipe.model.split import StageModule
from funcpipe.training.batchnorm import RunningStatistics
from funcpipe.training.data import Step
from funcpipe.training.gradients import FlatGradient
from funcpipe.training.norms import GradientNorm, sum_of_squares
from funcpipe.training.passes import Batch, LossFunction, Passes
from funcpipe.training.stage_optimizer import OptimizerFactory, StageOptimizer
from funcpipe.training.state import StageState
from funcpipe.training.ties import TiedParameters


class Computation:
    """The parts of one replica's computation, and what they do together."""

    def __init__(
        self,
        stage: StageModule,
        *,
        loss: LossFunction,
        optimizer: OptimizerFactory,
        seed: int,
        recompute: bool,
        replica: int,
        replicas: int,
        stage_number: int = 0,
        ties: Sequence[TieRoute] = (),
        norm: GradientNorm | None = None,
        shards: Pattern | None = None,
    ) -> None:
        """Stage `stage_number` of the model, which sums the gradients of its parameters in `ties` with other stages.

        With `norm`, the step depends on the norm of all stages' gradients. With `shards`, the optimiser is divided over
        the replicas as that pattern cuts the gradient.
        """
        self._stage_number = stage_number
        self._replica = replica
        self._replicas = replicas
        parameters = [p for p in stage.parameters() if p.requires_grad]
        named = dict(stage.named_parameters(remove_duplicate=False))
        self.parameters = tuple(stage.parameters())
        self.passes = Passes(stage, loss=loss, seed=seed, recompute=recompute)
        self.norm = norm or GradientNorm()
        self.tied = TiedParameters({common: named[name] for name, common in stage.shared.items()}, ties, stage_number)
        self._summed_here = [p for p in parameters if not self.tied.is_borrowed(p)]
        self._statistics = RunningStatistics(stage)
        self._flat = FlatGradient(self._summed_here, self._statistics.contributions()) if replicas > 1 else None
        self._optimizer = StageOptimizer(stage, parameters, optimizer, seed=seed)
        if shards is not None:
            self._optimizer.divide(self.flat.layout, shards, replica)

    def begin_step(self, step: Step, load: Callable[[Sequence[int]], Batch]) -> None:
        """Start a step; `load` loads the samples at some indices, where the stage needs them."""
        self._step_number = step.number
        own = range(self._replica, len(step.micro_batches), self._replicas)
        self.passes.begin_step(step, own, load)
        self._statistics.begin_step(len(step.micro_batches))
        if self._flat is not None:
            self._flat.begin_step()

    def forward(self, micro_batch: int) -> None:
        """Compute what later stages need of `micro_batch` and, in the last stage, its loss."""
        self.passes.forward(micro_batch)
        self._statistics.after_forward(micro_batch)

    def backward(self, micro_batch: int) -> None:
        """Add this micro-batch's part to the gradients; if it is the one that has been started, wait for its end."""
        if self._flat is None or not self._flat.finish_last_backward():
            self._propagate(micro_batch)

    def start_last_backward(self, micro_batch: int) -> None:
        """Start the step's last `backward` in a thread: it makes elements of `flat` final one after the other."""
        self.flat.start_last_backward(lambda: self._propagate(micro_batch))

    def _propagate(self, micro_batch: int) -> None:
        self.passes.backward(micro_batch, loss_factor=self.norm.loss_factor)

    def flatten(self) -> None:
        """Complete the vector of the step's gradients and of what else the replicas sum."""
        self.flat.complete(self._statistics.contributions())

    @property
    def flat(self) -> FlatGradient:
        """The vector of the step's gradients, which the replicas sum; there is none with a single replica."""
        assert self._flat is not None, "a single replica sums nothing"
        return self._flat

    @property
    def is_sharded(self) -> bool:
        """Whether this replica keeps only a part of the optimiser's state."""
        return self._optimizer.is_sharded

    def update_split(self, round_number: int, values: Tensor) -> None:
        """Replace what this replica has summed in a round by the updated parameters, if the optimiser is divided."""
        self._optimizer.update_split(round_number, values)

    def tied_sums(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The gradients of the whole global batch of tied parameters that this stage sums."""
        if self._flat is None:
            return self.tied.gradients(names)
        sums = {name: self._flat.summed(self.tied.parameter(name)) for name in names}
        return {name: gradient for name, gradient in sums.items() if gradient is not None}

    def measure_norm(self) -> None:
        """Record the squares of the gradients that this stage sums; tied ones count in one stage only."""
        own = sum_of_squares(p.grad for p in self._summed_here) if self._flat is None else self._flat.sum_of_squares()
        self.norm.add_stage(self._stage_number, own)

    def update(self) -> None:
        """Take the step of the optimiser and of the running statistics, with the sums over the whole global batch."""
        statistics = self._unpack()
        self.tied.finish_step()
        self._optimizer.step(self._step_number, gradient_factor=self.norm.finish_step())
        self._statistics.finish_step(statistics)
        self.passes.end_step()

    def state(self) -> StageState:
        """What the stage has learned, between two steps; of a divided optimiser, this replica's shard."""
        return self._optimizer.state(self.norm)

    def restore(self, state: StageState) -> None:
        """Go back to `state`. Raises CorruptMessage if it is not this stage's."""
        self._optimizer.restore(state, self.norm)

    def _unpack(self) -> list[Tensor]:
        """Give the parameters what the replicas have summed; the summed contributions to the running statistics."""
        if self._flat is None:
            return self._statistics.contributions()
        return list(self._flat.unpack_parameters() if self.is_sharded else self._flat.unpack_gradients())
