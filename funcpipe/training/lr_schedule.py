"""The learning-rate schedule: torch's scheduler on one optimiser, stepped where plain training steps it.

Every stage makes the same scheduler on its own optimiser, and steps it at the same training steps, so all stages have
the same learning rate. A step that is skipped because gradients overflowed counts too, as in torch's usual loop.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from funcpipe.core import Interval
from funcpipe.errors import DataError, InputError, PlanError
from funcpipe.training.data import Step
from funcpipe.training.recipe import Recipe
from funcpipe.training.state_tree import join_tensors, split_tensors

PREFIX = "scheduler"
"""The prefix of the names of the tensors that a scheduler keeps."""


class LrSchedule:
    """The scheduler that `recipe` has, on `optimizer`."""

    def __init__(self, recipe: Recipe, optimizer: Optimizer) -> None:
        """Raises InputError unless the recipe's factory makes a scheduler of this optimiser."""
        assert recipe.scheduler is not None, "without a scheduler there is no schedule"
        made = recipe.scheduler(optimizer)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # or torch warns when the first step is skipped
        if not isinstance(made, LRScheduler):
            raise InputError(
                f"the scheduler factory returns a {type(made).__name__}; it must return a scheduler of "
                "torch.optim.lr_scheduler, or a subclass of its LRScheduler; join several in a SequentialLR or a "
                "ChainedScheduler"
            )
        if made.optimizer is not optimizer:
            raise InputError(
                f"the {type(made).__name__} that the scheduler factory returns is of another optimiser than the one "
                "that the factory is given; make it of the factory's argument: scheduler=lambda optimizer: …"
            )
        self._scheduler = made
        self._interval, self._monitor = recipe.scheduler_interval, recipe.scheduler_monitor

    @property
    def kind(self) -> str:
        """The scheduler's class."""
        return type(self._scheduler).__name__

    @property
    def needs_validation(self) -> bool:
        """True if it is stepped with a value of a validation."""
        return isinstance(self._scheduler, ReduceLROnPlateau)

    def after_step(self, step: Step) -> None:
        """Step the scheduler if it is due after `step`."""
        if not self.needs_validation and (self._interval is Interval.STEP or step.ends_epoch):
            self._scheduler.step()

    def after_validation(self, values: Mapping[str, float]) -> None:
        """Step a ReduceLROnPlateau with the value that it monitors. Raises DataError if `values` lacks that."""
        if not isinstance(self._scheduler, ReduceLROnPlateau):
            return
        if self._monitor not in values:
            raise DataError(
                f"the {self.kind} monitors {self._monitor!r}, which the validation does not have; "
                f"let scheduler_monitor be one of {', '.join(sorted(values)) or 'its metrics'}"
            )
        self._scheduler.step(values[self._monitor])

    def capture(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """The scheduler's state as JSON; its tensors go into `tensors`. Raises ModelError if it is not plain data."""
        return {"kind": self.kind, "state": split_tensors(self._scheduler.state_dict(), PREFIX, tensors)}

    def restore(self, saved: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go back to what `capture` returned. Raises PlanError if that was another kind of scheduler."""
        if saved["kind"] != self.kind:
            raise PlanError(
                f"the run was started with a {saved['kind']} as its scheduler, not a {self.kind}; "
                "resume it with what it was started with"
            )
        self._scheduler.load_state_dict(join_tensors(saved["state"], tensors))
