"""The state besides weights that a FuncPipe keeps from its earlier runs for the next one."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import nn

from funcpipe.errors import PlanError
from funcpipe.model.split import StageModule
from funcpipe.model.split.module_state import read_attributes
from funcpipe.training.state import ATTRIBUTES, MODEL, StageState, select_for_stage, tensor_names


@dataclass(frozen=True, kw_only=True)
class Learned:
    """The `state` of the whole model after `epochs` epochs: the optimiser's part of it counts.

    Weights, buffers and attributes are those that the module has when the next run begins.
    """

    state: StageState
    epochs: int

    def check(self, stages: Iterable[nn.Module]) -> None:
        """Raise PlanError if the module has other parameters than those that were trained before."""
        for stage in stages:
            try:
                select_for_stage(self.state, stage)
            except PlanError as error:
                raise PlanError(
                    "the module has changed since this FuncPipe trained it, so that its optimiser cannot go on "
                    f"({error}); call reset() to begin with a new optimiser"
                ) from error

    def state_of(self, stage: nn.Module) -> StageState:
        """The initial state of `stage`: its present tensors and attributes, and the optimiser as it was."""
        selected = select_for_stage(self.state, stage)
        tensors = {**selected.tensors, **{MODEL + name: t.detach() for name, t in tensor_names(stage)[0].items()}}
        settings = dict(selected.settings)
        if isinstance(stage, StageModule) and stage.carried.blocks:
            settings[ATTRIBUTES] = read_attributes(stage, stage.carried.blocks, stage.carried.attributes, tensors)
        return replace(selected, tensors=tensors, settings=settings)
