"""A model that cannot be divided: it becomes one node, which runs the user's code as it is."""

from typing import Any

import torch.fx
from torch import Tensor, nn

from funcpipe.model.graph.modes import set_mode
from funcpipe.model.graph.program import WHOLE
from funcpipe.model.graph.signature import Signature
from funcpipe.model.graph.tracers import RecordedModule, Traced, TraceRequest
from funcpipe.model.tensors import LEAF


class WholeModel(nn.Module):
    """Calls a user's model with the tensors of its signature; shares the model's parameters, buffers and modules, so
    that their names are those of the model.
    """

    def __init__(self, model: nn.Module, signature: Signature) -> None:
        super().__init__()
        vars(self)["model"] = model  # not as a child, which would change the names
        self.signature = signature
        share_contents(self, model)

    def forward(self, *tensors: Tensor) -> Any:
        """The model's output, as it is."""
        args, kwargs = self.signature.arguments(dict(zip(self.signature.tensors, tensors, strict=True)))
        return vars(self)["model"](*args, **kwargs)

    def train(self, mode: bool = True) -> "WholeModel":
        """Have the model's own `train()` or `eval()` called."""
        set_mode(vars(self)["model"], training=mode)
        self.training = mode
        return self


def share_contents(module: nn.Module, source: nn.Module) -> None:
    """Let `module` have the very parameters, buffers and children of `source`, whatever becomes of them."""
    module._parameters, module._buffers, module._modules = source._parameters, source._buffers, source._modules
    module._non_persistent_buffers_set = source._non_persistent_buffers_set


def trace_whole(request: TraceRequest) -> Traced:
    """A graph with the model as its only node."""
    graph = torch.fx.Graph()
    inputs = []
    for name in request.signature.tensors:
        node = graph.placeholder(name.replace(".", "_"))
        node.meta["input"] = name
        inputs.append(node)
    output = graph.call_module(WHOLE, tuple(inputs))
    graph.output((output,))
    module = RecordedModule({WHOLE: WholeModel(request.model, request.signature)}, graph)
    return Traced(module, (output,), LEAF)
