"""A device that computes as this processor does, and on which nothing works that a GPU would refuse.

Its tensors lie in memory that the host's operators cannot reach: an operator that is given a tensor of each fails, but
for numbers of the host (tensors without dimensions), as on CUDA. What is copied each way is counted, and so is what it
holds, which is limited. It has random numbers and streams of its own (`stand_in_device.py`). It is torch's PrivateUse1
backend, so `torch.accelerator` finds it, autograd runs its backwards in a thread of the device, and optimisers choose
the kernels that they choose on GPUs.

A process has the device for good, and from before its first backward. So tests `on_stand_in` run in a process of their
own, which they share.
"""

import functools
import importlib
import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

from tests.support.stand_in_device import (
    COUNTER,
    CROSSINGS,
    MEMORY,
    NAME,
    PINNED,
    RANDOM,
    Crossing,
    Module,
    computing,
    current_stream,
    is_on_device,
    on_device,
    on_host,
)

_F = TypeVar("_F", bound=Callable[..., None])


def _run(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run `operator` on tensors of the host that share the memory of the device's."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    stands_for: dict[int, Tensor] = {}
    for i, leaf in enumerate(leaves):
        if is_on_device(leaf):
            leaves[i] = on_host(leaf) if leaf.numel() else torch.empty(leaf.shape, dtype=leaf.dtype)
            MEMORY.check(leaves[i])
            stands_for[id(leaves[i])] = leaf
        elif isinstance(leaf, Tensor) and leaf.dim():
            raise RuntimeError(f"{operator}: expected all tensors on {NAME}, but found one on {leaf.device}")
        elif isinstance(leaf, torch.device):
            leaves[i] = torch.device("cpu")
    current_stream().ask()
    shared, named = pytree.tree_unflatten(leaves, tree)
    with RANDOM.in_use(operator):
        found = operator(*shared, **named)
    for leaf in leaves:
        if id(leaf) in stands_for and leaf.shape != stands_for[id(leaf)].shape:
            _resize(stands_for[id(leaf)], leaf)
    infos = [returned.alias_info for returned in operator._schema.returns]
    if any(info is not None and not info.is_write for info in infos):
        base = next(iter(stands_for.values()))
        return pytree.tree_map_only(Tensor, lambda made: _view(base, made), found)

    def moved(made: Tensor) -> Tensor:
        return stands_for[id(made)] if id(made) in stands_for else on_device(made)

    return pytree.tree_map_only(Tensor, moved, found)


_AS_ON_HOST = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
"""For operators that change nothing but the form of a tensor, whose kernels for the host do for any device."""


def _view(base: Tensor, like: Tensor) -> Tensor:
    """Return the view of `base` that has the form and place of `like`, a tensor of the host in the same memory."""
    offset = (like.data_ptr() - base.untyped_storage().data_ptr()) // like.element_size() if like.numel() else 0
    return _as_strided(base, like.shape, like.stride(), offset)


def _as_strided(base: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Tensor:
    found: Tensor = torch.ops.aten.as_strided.default.redispatch(_AS_ON_HOST, base, size, stride, offset)
    return found


def _resize(tensor: Tensor, like: Tensor) -> None:
    """Give an empty tensor that an operator has written to the memory that it wrote."""
    made, set_ = on_device(like), torch.ops.aten.set_.source_Storage_storage_offset
    set_.redispatch(_AS_ON_HOST, tensor, made.untyped_storage(), 0, made.shape, made.stride())


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if is_on_device(target) is not is_on_device(source):
        COUNTER.add(source, to_host=is_on_device(source))
    into, values = (on_host(tensor) if is_on_device(tensor) else tensor for tensor in (target, source))
    stream, to_host = current_stream(), is_on_device(source)
    if stream is computing():
        into.copy_(values)
        return target
    if not non_blocking or not PINNED.holds(into if to_host else values):
        raise RuntimeError("a copy in a stream of its own would hold the processor up")
    into.fill_(float("nan") if into.is_floating_point() else 1)
    after = stream.after

    def copy() -> None:
        CROSSINGS.append(Crossing(to_host, after, computing().asked))
        into.copy_(values)

    stream.ask(copy)
    return target


def _empty_like(
    tensor: Tensor,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: bool | None = None,
    memory_format: Any = None,
) -> Tensor:
    made = torch.empty_like(on_host(tensor), dtype=dtype, memory_format=memory_format or torch.preserve_format)
    if device is None or device.type == NAME:
        return on_device(made)
    return PINNED.hold(made) if pin_memory else made


def _pin(tensor: Tensor, device: Any = None) -> Tensor:
    return PINNED.hold(tensor.clone())


def _number(tensor: Tensor) -> Any:
    COUNTER.add(tensor, to_host=True)
    return on_host(tensor).item()


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
    return on_device(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return on_device(torch.empty_strided(size, stride, dtype=dtype))


def _arange(start: Any, stop: Any = None, step: Any = 1, *, dtype: Any = None, **_: Any) -> Tensor:
    first, end = (0, start) if stop is None else (start, stop)
    return on_device(torch.arange(first, end, step, dtype=dtype))


def _convolution_backward(gradient: Tensor, inputs: Tensor, weight: Tensor, *rest: Any) -> Any:
    transposed, groups = rest[3], rest[5]
    bias = [weight.shape[1] * groups if transposed else weight.shape[0]]
    return _run(torch.ops.aten.convolution_backward.default, gradient, inputs, weight, bias, *rest)


_WITH_KERNELS = (
    *("native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward"),
    "native_dropout",
)
"""Operators for which GPUs have kernels, and devices that torch does not know take them apart."""


class _Attention(torch.autograd.Function):
    """Attention by one kernel, which keeps no probabilities, as that of GPUs."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Any, scale: Any) -> Tensor:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        output, logsumexp = _run(kernel, query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.options = causal, mask, scale
        found: Tensor = output
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        causal, mask, scale = ctx.options
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        found = _run(kernel, gradient, *ctx.saved_tensors, 0.0, causal, attn_mask=mask, scale=scale)
        return *found, None, None, None


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    assert not dropout_p, "the processor's kernel draws nothing"
    assert not enable_gqa, "the processor's kernel has as many keys as queries"
    found: Tensor = _Attention.apply(query, key, value, is_causal, attn_mask, scale)  # type: ignore[no-untyped-call]
    return found


_IN_BF16 = ("linear", "matmul", "conv2d", "scaled_dot_product_attention")
_IN_FP32 = ("layer_norm", "cross_entropy_loss")
"""Operators that autocast casts for, as CUDA's does: see torch.amp's documentation."""

_AUTOCAST = torch._C._parse_dispatch_key("AutocastPrivateUse1")


def _cast(operator: OpOverload, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    """Run an operator on its tensors of 32 or 16 bits as `dtype`, or as what autocast casts to."""
    wanted = dtype or torch.get_autocast_dtype(NAME)

    def cast(value: Tensor) -> Tensor:
        return value.to(wanted) if value.is_floating_point() else value

    args, kwargs = pytree.tree_map_only(Tensor, cast, (args, kwargs))
    assert _AUTOCAST is not None
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_AUTOCAST)):
        return operator(*args, **kwargs)


def install() -> None:
    """Give this process the device."""
    torch.set_num_threads(1)
    backend_registration._setup_privateuseone_for_python_backend(NAME, Module())
    computing()
    torch.__future__.set_swap_module_params_on_conversion(True)  # `to` keeps parameters the objects that they are
    library: Any = torch.library.Library
    everything, aten = library("_", "IMPL"), library("aten", "IMPL")
    everything.fallback(_run, "PrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    kernels: dict[str, Callable[..., Any]] = {
        "copy_": _copy,
        "_local_scalar_dense": _number,
        "empty.memory_format": _empty,
        "empty_strided": _empty_strided,
        "as_strided": _as_strided,
        "empty_like": _empty_like,
        "record_stream": MEMORY.record_stream,
        "arange": _arange,
        "arange.start": _arange,
        "arange.start_step": _arange,
        **{name: functools.partial(_run, getattr(torch.ops.aten, name).default) for name in _WITH_KERNELS},
        "convolution_overrideable": functools.partial(_run, torch.ops.aten.convolution.default),
        "convolution_backward_overrideable": _convolution_backward,
    }
    for name, kernel in kernels.items():
        aten.impl(name, kernel, "PrivateUse1")
    aten.impl("_pin_memory", _pin, "CPU")
    aten.impl("is_pinned", PINNED.holds, "CPU")
    aten.impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1")
    for name in _IN_BF16:
        aten.impl(name, functools.partial(_cast, getattr(torch.ops.aten, name).default), "AutocastPrivateUse1")
    for name in _IN_FP32:
        cast = functools.partial(_cast, getattr(torch.ops.aten, name).default, dtype=torch.float32)
        aten.impl(name, cast, "AutocastPrivateUse1")
    _INSTALLED.extend((everything, aten))


_INSTALLED: list[torch.library.Library] = []


def on_stand_in(test: _F) -> _F:
    """Run `test` in a process that has the device."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        _process().submit(_call, test.__module__, test.__name__, args, kwargs).result()

    return run  # type: ignore[return-value]


@functools.cache
def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=install)


def _call(module: str, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    try:
        getattr(importlib.import_module(module), name).__wrapped__(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - whatever it is, the test's process may not have its class
        raise AssertionError("".join(traceback.format_exception(error))) from None
