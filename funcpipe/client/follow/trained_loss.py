"""The trained loss of a run: read from a checkpoint, and written into the user's own loss."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from funcpipe.errors import ModelError
from funcpipe.model.graph.reachable import reaches
from funcpipe.model.split.module_state import Attributes, write_attributes
from funcpipe.model.split.stage import block_names, hold, of_loss
from funcpipe.model.tensors import load_tensors, named_tensors, saved_state
from funcpipe.training.state import ATTRIBUTES, StageState


@dataclass(frozen=True, kw_only=True)
class TrainedLoss:
    """The `tensors` of a loss that are trained or change with its calls, under the names that it has for them.

    `averaged` are the same with the average over steps, and `best` those of the best validation; empty without.
    `attributes` are the Python attributes that calls change for the next ones, of modules in `blocks`.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    averaged: Mapping[str, Tensor] = field(default_factory=dict)
    best: Mapping[str, Tensor] = field(default_factory=dict)
    attributes: Attributes = field(default_factory=dict)
    blocks: tuple[str, ...] = ()

    @classmethod
    def of(cls, learned: StageState, best: StageState | None = None) -> "TrainedLoss":
        """The loss in `learned`, all of a checkpoint; `best` is that of the best validation."""
        return cls(
            tensors=learned.loss_state_dict(),
            averaged=learned.averaged_loss_state_dict(),
            best={} if best is None else best.loss_state_dict(),
            attributes=learned.loss_attributes(),
            blocks=block_names(learned.settings.get(ATTRIBUTES, {})),
        )

    def places_in(self, loss: Callable[..., Any]) -> dict[str, Tensor]:
        """The tensors of `loss` that these are written into. Raises ModelError if it has no such modules."""
        modules = {path: value for path, value in reaches(loss) if isinstance(value, nn.Module)}
        for path in of_loss(dict.fromkeys(self.blocks)):
            if path not in modules:
                raise ModelError(f"the run trained a loss with a module {path!r}; make the loss as it was for the run")
        return named_tensors(hold(loss, self.blocks))

    def write_to(self, loss: Callable[..., Any]) -> None:
        """Write it into `loss`."""
        holder = hold(loss, self.blocks)
        load_tensors(holder, self.tensors)
        write_attributes(holder, self.attributes)

    def with_all_of(self, loss: Callable[..., Any]) -> "TrainedLoss":
        """The same with all tensors of a `loss` that is a module, as its `state_dict` has them."""
        if not isinstance(loss, nn.Module) or not self.tensors:
            return self
        whole = saved_state(loss)
        return replace(
            self,
            tensors={**whole, **self.tensors},
            averaged={**whole, **self.averaged} if self.averaged else {},
            best={**whole, **self.best} if self.best else {},
        )
