"""Find the running statistics among a model's buffers, and how they are updated."""

from collections.abc import Set

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from funcpipe.errors import ModelError
from funcpipe.model.graph.program import attribute
from funcpipe.model.graph.values import Statistic


def statistics_of(model: nn.Module, changed: Set[str]) -> tuple[Statistic, ...]:
    """The running statistics among the buffers that a forward pass of `model` `changed`.

    Raises ModelError if it changes any other buffer, which would differ between replicas.
    """
    found = []
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        names = (f"{prefix}running_mean", f"{prefix}running_var")
        if isinstance(module, _NormBase) and not changed.isdisjoint(names):
            found.append(Statistic(names, f"{prefix}num_batches_tracked", module.momentum))
    known = {name for item in found for name in (*item.names, item.count)}
    for name in sorted(changed - known):
        owner = type(attribute(model, name.rpartition(".")[0])).__name__ if "." in name else type(model).__name__
        raise ModelError(
            f"the forward pass changes the buffer {name} (of {owner}), which would differ between replicas and stages; "
            "only the running statistics of BatchNorm and InstanceNorm can be merged. Put that module in eval mode "
            "or do not change the buffer in the forward pass"
        )
    return tuple(found)
