"""What a run leaves, written into the user's model and loss."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from funcpipe.client.follow.results import RunResult
from funcpipe.client.prepare.learned import Learned
from funcpipe.model.split.module_state import Attributes, write_attributes
from funcpipe.model.tensors import load_tensors
from funcpipe.training.losses import LossFunction
from funcpipe.training.state import MODEL, StageState, tensor_names


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
