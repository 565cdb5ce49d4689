"""Count the arithmetic of a layer: floating-point operations by torch's own formulas, and bytes read and written."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from funcpipe.core.accelerator import Work
from funcpipe.model.tensors import flatten

_aten = torch.ops.aten
_FREE = frozenset(
    [_aten._unsafe_view, _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided]
)
"""Operators that read and write nothing, beside views and those (prim) that tell where a tensor without contents is."""


class WorkCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the work of all operators that run within its context. Views read and write nothing."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._flop = self._dense_bytes = self._other_bytes = 0

    @property
    def work(self) -> Work:
        """What was counted."""
        return Work(flop=self._flop, dense_bytes=self._dense_bytes, other_bytes=self._other_bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        is_plain = isinstance(func, OpOverload)
        operator = func._overloadpacket if is_plain else func
        flop: Callable[..., int] | None = flop_registry.get(operator)
        moved = _bytes((args, kwargs)) + _bytes(result)
        if flop is not None:
            self._flop += flop(*args, **kwargs, out_val=result)
            self._dense_bytes += moved
        elif operator not in _FREE and not (is_plain and (func.is_view or func.namespace == "prim")):
            self._other_bytes += moved
        return result


def _bytes(values: Any) -> int:
    return sum(leaf.numel() * leaf.itemsize for leaf in flatten(values)[0] if isinstance(leaf, Tensor))
