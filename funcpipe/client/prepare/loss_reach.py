"""A check that a loss holds no parameters of the model, which it would copy, and none that cannot be trained."""

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from funcpipe.errors import ModelError
from funcpipe.model.graph.reachable import reached_of, reaches
from funcpipe.training.losses import LossFunction

_COPY = "functions compute the loss with a copy, which is not trained"

WAY_OUT = (
    "return from the model's forward, as one more output, what the loss needs of it; put a penalty on weights into the "
    "forward, or use the optimiser's weight_decay; make a method of the model a function of output and target alone"
)


def check_reach(model: nn.Module, loss: LossFunction) -> None:
    """Raise ModelError if `loss` reaches trainable parameters of `model`, or has parameters that cannot be trained."""
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    found = reached_of(loss, trainable)
    if found:
        name, path = next(iter(found.items()))
        more = f", and {len(found) - 1} more of its parameters" if len(found) > 1 else ""
        raise ModelError(f"the loss holds {name} of the model as loss.{path}{more}; {_COPY}: {WAY_OUT}")
    for path, value in reaches(loss):
        if isinstance(value, nn.Parameter):
            if is_lazy(value):
                raise ModelError(f"the parameter loss.{path} has no shape yet; call the loss once before training")
        elif isinstance(value, Tensor) and value.requires_grad and value.is_leaf:
            raise ModelError(
                f"loss.{path} requires a gradient, but is no parameter, so that it cannot be trained; "
                "make it an nn.Parameter, or leave out requires_grad"
            )
