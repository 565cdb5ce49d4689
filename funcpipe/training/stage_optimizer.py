"""The optimiser of one stage, whole or divided over the replicas, and the state that checkpoints hold."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager

from torch import Tensor, nn

from funcpipe.comm.piece_ranges import piece_ranges
from funcpipe.comm.sum_pattern import Pattern
from funcpipe.model.draws import SHARED_GENERATORS, layer_seed, reseed
from funcpipe.model.split import StageModule
from funcpipe.training.batches import Step
from funcpipe.training.device import HOST, Device
from funcpipe.training.gradients import Layout
from funcpipe.training.norms import GradientNorm
from funcpipe.training.optimizers import ParameterShape, stage_optimizer
from funcpipe.training.recipe import LrSchedule, Recipe
from funcpipe.training.sharding import ShardedOptimizer, capture_shard, restore_shard
from funcpipe.training.state import (
    SCHEDULER,
    StageState,
    capture_state,
    mismatch_is_corrupt,
    restore_state,
    tensor_names,
    with_settings,
)
from funcpipe.training.state_copy import Complete, StateCopy


class StageOptimizer:
    """Updates the parameters of one replica of a stage, with the gradients of the whole global batch.

    A divided optimiser updates this replica's split as soon as its sum is known (`update_split`), and leaves nothing to
    do for `step`. `learning_rate` is that of the first parameter group in the last step; None before the first one, if
    the stage has nothing to train, or if the optimiser has no such rate.
    """

    learning_rate: float | None = None

    def __init__(
        self,
        stage: StageModule,
        recipe: Recipe,
        whole: Sequence[ParameterShape] = (),
        *,
        seed: int,
        device: Device = HOST,
    ) -> None:
        """`whole` are the trainable parameters of the model; the stage, on `device`, may have none of them."""
        self._stage = stage
        self._device = device
        self._copy = StateCopy(device, stage)
        self._seed = seed
        own = trainable_parameters(stage, {shape.name for shape in whole})
        self._parameters = tuple(own.values())
        self._clip_grad_value = recipe.clip_grad_value
        self._optimizer = stage_optimizer(recipe.optimizer, own, whole) if own else None
        self._schedule: LrSchedule | None = None
        if self._optimizer is not None and recipe.scheduler is not None:
            self._schedule = LrSchedule(recipe, self._optimizer)
        self._sharded: ShardedOptimizer | None = None

    def divide(self, layout: Layout, pattern: Pattern, replica: int, unit: int = 1) -> None:
        """Leave to this replica the split of the flat gradient that `pattern` gives it, one range in each round, cut at
        multiples of `unit`.
        """
        if self._optimizer is None:
            return
        split = pattern.merges(replica)
        assert split is not None, "every replica sums a split of its own"
        ranges = [splits[split] for splits in piece_ranges(layout.elements, pattern, layout.head, unit)]
        self._sharded = ShardedOptimizer(
            self._optimizer, layout, ranges, clip_grad_value=self._clip_grad_value, device=self._device
        )

    @property
    def is_sharded(self) -> bool:
        """True if this replica updates, and saves the state of, a part of the parameters only."""
        return self._sharded is not None

    def update_split(self, round_number: int, values: Tensor) -> None:
        """Replace `values`, the gradients that this replica has summed in a round, by the updated parameters.

        Does nothing unless the optimiser is divided.
        """
        self._copy.settle()
        if self._sharded is not None:
            self._sharded.update(round_number, values)

    def step(self, step: Step, *, gradient_factor: float | None) -> None:
        """Take `step` with the gradients times `gradient_factor`, or skip it if that is None; then the schedule's."""
        self._copy.settle()
        if self._optimizer is not None:
            rate = self._optimizer.param_groups[0].get("lr")
            self.learning_rate = None if rate is None else float(rate)
        if self._optimizer is not None and self._sharded is None:
            if gradient_factor is not None:
                self._scale_gradients(gradient_factor)
                if self._clip_grad_value is not None and any(p.grad is not None for p in self._parameters):
                    nn.utils.clip_grad_value_(self._parameters, self._clip_grad_value)  # fails if there is none
                with SHARED_GENERATORS.computing():
                    reseed(layer_seed(self._seed, step.number, 0, "optimizer"))
                    self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        if self._schedule is not None:
            self._schedule.after_step(step)

    def after_validation(self, values: Mapping[str, float]) -> None:
        """Pass a validation's results, by name, to the schedule. Raises DataError if the one it needs is missing."""
        if self._schedule is not None:
            self._schedule.after_validation(values)

    def begin_state(self, norm: GradientNorm, complete: Complete) -> AbstractContextManager[StageState]:
        """Give the stage's state between two steps on the host, `complete`; of a divided optimiser, this replica's
        shard. See `StateCopy`.
        """
        return self._copy.begin(self.state(norm), complete)

    def state(self, norm: GradientNorm) -> StageState:
        """Return the same where it is, not copied."""
        if self._sharded is not None:
            state = capture_shard(self._stage, self._sharded, norm)
        else:
            state = capture_state(self._stage, self._optimizer, norm)
        if self._schedule is None:
            return state
        tensors: dict[str, Tensor] = {}
        return with_settings(state, {SCHEDULER: self._schedule.capture(tensors)}, tensors)

    def restore(self, state: StageState, norm: GradientNorm) -> None:
        """Go back to `state`. Raises CorruptMessage if it is not this stage's."""
        self._copy.settle()
        if self._sharded is not None:
            restore_shard(state, self._stage, self._sharded, norm)
        else:
            restore_state(state, self._stage, self._optimizer, norm)
        if self._schedule is not None and SCHEDULER in state.settings:
            with mismatch_is_corrupt():
                self._schedule.restore(state.settings[SCHEDULER], state.tensors)

    def _scale_gradients(self, factor: float) -> None:
        for parameter in self._parameters:
            if factor != 1.0 and parameter.grad is not None:
                parameter.grad.mul_(factor)


def trainable_parameters(stage: StageModule, known: Collection[str]) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of `stage`, each under that of its names that is `known`."""
    names, aliases = tensor_names(stage)
    other = {first: alias for alias, first in aliases.items() if alias in known}
    return {
        name if name in known else other.get(name, name): tensor
        for name, tensor in names.items()
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad
    }
