"""The optimiser of one stage, whole or divided over the replicas, and the state that checkpoints hold."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from funcpipe.comm.collectives import Pattern, cut
from funcpipe.model.seeds import layer_seed, reseed
from funcpipe.model.split import StageModule
from funcpipe.training.gradients import Layout
from funcpipe.training.norms import GradientNorm
from funcpipe.training.sharding import ShardedOptimizer
from funcpipe.training.state import StageState, capture_state, restore_state
from funcpipe.training.state_shards import capture_shard, restore_shard

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class StageOptimizer:
    """Updates the parameters of one replica of a stage, with the gradients of the whole global batch.

    A divided optimiser updates this replica's split as soon as its sum is known (`update_split`), and leaves nothing to
    do for `step`.
    """

    def __init__(
        self, stage: StageModule, parameters: Sequence[nn.Parameter], factory: OptimizerFactory, *, seed: int
    ) -> None:
        """`parameters` are those that require gradients; a stage may have none."""
        self._stage = stage
        self._parameters = parameters
        self._seed = seed
        self._optimizer = factory(parameters) if parameters else None
        self._sharded: ShardedOptimizer | None = None

    def divide(self, layout: Layout, pattern: Pattern, replica: int) -> None:
        """Leave to this replica the split of the flat gradient that `pattern` gives it, one range in each round."""
        if self._optimizer is None:
            return
        split = pattern.merges(replica)
        assert split is not None, "every replica sums a split of its own"
        ranges = [splits[split] for splits in cut(layout.elements, pattern, layout.head)]
        self._sharded = ShardedOptimizer(self._optimizer, layout, ranges)

    @property
    def is_sharded(self) -> bool:
        """Whether this replica updates, and saves the state of, a part of the parameters only."""
        return self._sharded is not None

    def update_split(self, round_number: int, values: Tensor) -> None:
        """Replace `values`, the gradients that this replica has summed in a round, by the updated parameters.

        Does nothing unless the optimiser is divided.
        """
        if self._sharded is not None:
            self._sharded.update(round_number, values)

    def step(self, number: int, *, gradient_factor: float | None) -> None:
        """Take step `number` with the gradients times `gradient_factor`, or skip it if that is None."""
        if self._optimizer is None or self._sharded is not None:
            return
        if gradient_factor is not None:
            reseed(layer_seed(self._seed, number, 0, "optimizer"))
            self._scale_gradients(gradient_factor)
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def state(self, norm: GradientNorm) -> StageState:
        """What the stage has learned, between two steps; of a divided optimiser, this replica's shard."""
        if self._sharded is not None:
            return capture_shard(self._stage, self._sharded, norm)
        return capture_state(self._stage, self._optimizer, norm)

    def restore(self, state: StageState, norm: GradientNorm) -> None:
        """Go back to `state`. Raises CorruptMessage if it is not this stage's."""
        if self._sharded is not None:
            restore_shard(state, self._stage, self._sharded, norm)
        else:
            restore_state(state, self._stage, self._optimizer, norm)

    def _scale_gradients(self, factor: float) -> None:
        for parameter in self._parameters:
            if factor != 1.0 and parameter.grad is not None:
                parameter.grad.mul_(factor)
