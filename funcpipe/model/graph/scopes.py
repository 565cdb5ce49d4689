"""Parts of a model in which gradients or automatic casts are on or off, as functions of a graph.

torch.export has operators for them that load torch's compiler when they run: 80 MB and two seconds in a function.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch._higher_order_ops.wrap import wrap_with_autocast, wrap_with_set_grad_enabled


def with_gradients_set(enabled: bool, part: Callable[..., Any], *args: Any) -> Any:
    """Run `part` with gradients on or off."""
    with torch.set_grad_enabled(enabled):
        return part(*args)


def with_casts_set(
    device: str, dtype: torch.dtype | None, enabled: bool, cached: bool | None, part: Callable[..., Any], *args: Any
) -> Any:
    """Run `part` with automatic casts to `dtype` on or off."""
    with torch.autocast(device, dtype, enabled, cached):
        return part(*args)


_OURS: dict[Any, Callable[..., Any]] = {
    wrap_with_set_grad_enabled: with_gradients_set,
    wrap_with_autocast: with_casts_set,
}


def replace_scopes(exported: torch.fx.GraphModule) -> None:
    """Have a graph, and those inside of it, call the functions above where it would call torch's operators."""
    for module in exported.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                node.target = _OURS.get(node.target, node.target)
            module.recompile()
