"""Regions of a graph with gradients or autocast on or off, as plain functions.

The operators that torch.export uses for them load torch's compiler when they run: 80 MB and two seconds in a function.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch._higher_order_ops.wrap import wrap_with_autocast, wrap_with_set_grad_enabled


def with_gradients_set(enabled: bool, region: Callable[..., Any], *args: Any) -> Any:
    """Run `region` with gradients on or off."""
    with torch.set_grad_enabled(enabled):
        return region(*args)


def with_autocast_set(
    device: str, dtype: torch.dtype | None, enabled: bool, cached: bool | None, region: Callable[..., Any], *args: Any
) -> Any:
    """Run `region` with autocast to `dtype` on or off."""
    with torch.autocast(device, dtype, enabled, cached):
        return region(*args)


_OURS: dict[Any, Callable[..., Any]] = {
    wrap_with_set_grad_enabled: with_gradients_set,
    wrap_with_autocast: with_autocast_set,
}


def replace_scopes(exported: torch.fx.GraphModule) -> None:
    """Replace torch's operators in a graph, and in the graphs inside it, by the functions above."""
    for module in exported.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                node.target = _OURS.get(node.target, node.target)
            module.recompile()
