"""Find the running statistics among a model's buffers, and how they are updated."""

from collections.abc import Sequence, Set

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from funcpipe.errors import ModelError
from funcpipe.model.graph.program import attribute
from funcpipe.model.graph.values import Statistic


def statistics_of(
    model: nn.Module, changed: Set[str], tied_names: Sequence[tuple[str, ...]] = ()
) -> tuple[tuple[Statistic, ...], tuple[str, ...]]:
    """The running statistics among the buffers that a forward pass of `model` `changed`; and the other buffers.

    Raises ModelError if two modules hold one of the buffers.
    """
    for names in tied_names:
        owners = {id(attribute(model, name.rpartition(".")[0])) for name in names if "." in name}
        if len(owners) > 1 and not changed.isdisjoint(names):
            raise ModelError(
                f"the forward pass changes the buffer {names[0]}, which is {names[1]} too: two modules hold it; "
                "use one module in both places, or a buffer for each"
            )
    found = []
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        names = (f"{prefix}running_mean", f"{prefix}running_var")
        if isinstance(module, _NormBase) and not changed.isdisjoint(names):
            found.append(Statistic(names, f"{prefix}num_batches_tracked", module.momentum))
    known = {name for item in found for name in (*item.names, item.count)}
    return tuple(found), tuple(sorted(changed - known))
