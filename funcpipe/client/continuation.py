"""The state besides weights that a FuncPipe keeps from its earlier runs for the next one."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from funcpipe.client.results import RunResult
from funcpipe.errors import PlanError
from funcpipe.model.split import StageModule
from funcpipe.model.split.module_state import Attributes, read_attributes, write_attributes
from funcpipe.model.tensors import load_tensors
from funcpipe.training.losses import LossFunction
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


def write_back(result: RunResult, model: nn.Module, loss: LossFunction, epochs: int) -> Learned | None:
    """Write what a run of `epochs` epochs leaves into `model` and `loss`; returns the state for the next one.

    The tensors of the model are not held twice.
    """
    learned = result.learned
    write_trained(model, result.tensors, result.attributes, learned)
    result.loss.write_to(loss)
    if learned is None:
        return None
    own = tensor_names(model)[0]
    held = {MODEL + name: tensor.detach() for name, tensor in own.items()}
    tensors = {name: held.get(name, tensor) for name, tensor in learned.tensors.items()}
    return Learned(state=replace(learned, tensors=tensors), epochs=epochs)


def write_trained(
    model: nn.Module, tensors: dict[str, Tensor], attributes: Attributes, learned: StageState | None
) -> None:
    """Write trained tensors, and what forwards leave for the next ones, into `model`."""
    load_tensors(model, tensors)
    write_attributes(model, attributes)
    if learned is None:
        return
    buffers = dict(model.named_buffers())
    with torch.no_grad():  # those that a state_dict leaves out
        for name in learned.transient & buffers.keys():
            trained = learned.tensors.get(MODEL + name)
            if trained is not None and trained.shape == buffers[name].shape:
                buffers[name].copy_(trained)
