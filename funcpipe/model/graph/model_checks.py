"""Refuse models that cannot be trained in stages, before they are traced, and find the tensors with several names.

A tensor that a model holds under several names is one tensor everywhere.
"""

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as modules_of_torch
from torch.overrides import TorchFunctionMode

from funcpipe.errors import ModelError
from funcpipe.model.graph.user_code import class_and_line, current_line, title_of, with_code
from funcpipe.model.tensors import fingerprint, is_dense, named_tensors


def check_model(model: nn.Module, blocks: Sequence[str]) -> None:
    """Raise ModelError if `model` has no module of the paths `blocks`, or a parameter or buffer that is sparse, or if
    hooks of all modules run around it.
    """
    modules = dict(model.named_modules())
    for path in blocks:
        if path not in modules:
            raise ModelError(
                f"{type(model).__name__} has no module {path!r} to make a block of; named_modules() lists all paths"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not is_dense(tensor):
            owner = model.get_submodule(name.rpartition(".")[0])
            raise ModelError(
                f"{name}, of {class_and_line(owner)}, is a tensor of layout {tensor.layout}, which can be neither "
                "saved nor sent; keep it as a dense buffer, and call to_sparse() on that in the forward pass"
            )
    _check_global_hooks()


_GLOBAL_HOOKS = (
    ("_global_forward_pre_hooks", "register_module_forward_pre_hook", "register_forward_pre_hook"),
    ("_global_forward_hooks", "register_module_forward_hook", "register_forward_hook"),
    ("_global_backward_pre_hooks", "register_module_full_backward_pre_hook", "register_full_backward_pre_hook"),
    ("_global_backward_hooks", "register_module_full_backward_hook", "register_full_backward_hook"),
)
"""The places where torch keeps the hooks of all modules of a process, and what registers them for all and for one."""


def _check_global_hooks() -> None:
    for kept, register, for_one in _GLOBAL_HOOKS:
        hooks = getattr(modules_of_torch, kept)
        if hooks:
            first = next(iter(hooks.values()))
            raise ModelError(
                f"a hook of all modules of this process is registered ({register}): "
                f"{getattr(first, '__qualname__', type(first).__name__)}; functions are other processes, which have "
                f"none. Call remove() on its handle, and {for_one} on the modules of the model that it is for"
            )


_WHY = "so that each forward rewrites rows of the weight, which other micro-batches and replicas would not see in time"


def refuse_max_norm(model: nn.Module) -> None:
    """Raise ModelError for a module of `model` that rewrites its rows, even if none is long enough yet."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            norm, kind = module.max_norm, module.norm_type
            if isinstance(module, nn.EmbeddingBag):
                way_out = f"call F.embedding_bag with weight.renorm({kind}, 0, {norm})"
            else:
                way_out = (
                    f"scale what it returns: rows * ({norm} / rows.norm({kind}, -1, keepdim=True).clamp(min={norm}))"
                )
            raise ModelError(f"{title_of(model, path)} has max_norm={norm}, {_WHY}; leave max_norm out, and {way_out}")


def refuse_max_norm_of_calls(run: Callable[[], Any]) -> None:
    """Raise ModelError if `run` calls F.embedding or F.embedding_bag with `max_norm`."""
    with _Calls():
        run()


class _Calls(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        norm = (kwargs or {}).get("max_norm") if func in (F.embedding, F.embedding_bag) else None
        if norm is not None:
            raise ModelError(
                f"{with_code(current_line())} is given max_norm={norm}, {_WHY}; leave max_norm out, and give it "
                f"weight.renorm(2, 0, {norm})"
            )
        return func(*args, **(kwargs or {}))


def tied_names(model: nn.Module, changed: Set[str]) -> tuple[tuple[str, ...], ...]:
    """The names of each tensor of `model` that has several; `changed` are the buffers that a forward changes.

    Raises ModelError for two tensors in the same memory: training one would change the other.
    """
    tensors = named_tensors(model)
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    first = {found[0]: tensors[found[0]] for found in names.values()}
    written = {
        name for name, tensor in first.items() if tensor.requires_grad or not changed.isdisjoint(names[id(tensor)])
    }
    _refuse_overlaps(first, written)
    return tuple(tuple(found) for found in names.values() if len(found) > 1)


def _refuse_overlaps(tensors: Mapping[str, Tensor], written: Collection[str]) -> None:
    held = {name: t for name, t in tensors.items() if fingerprint(t) is None}
    starts = {name: t.data_ptr() for name, t in held.items() if t.numel() and t.layout is torch.strided}
    reached: list[str] = []  # tensors that may still reach into the one looked at
    for name in sorted(starts, key=starts.__getitem__):
        reached = [other for other in reached if starts[other] + _extent(tensors[other]) > starts[name]]
        for other in reached:
            if (name in written or other in written) and _overlap(tensors[name], tensors[other]):
                raise ModelError(
                    f"{other} and {name} are two tensors in the same memory, which stages cannot share; assign one "
                    "Parameter to both names, or keep one of them and compute the other in the forward"
                )
        reached.append(name)


def _extent(tensor: Tensor) -> int:
    """The bytes from the first to the last element."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors share an element, where the memory from first to last element overlaps."""
    if all(_extent(tensor) == tensor.nbytes for tensor in (one, other)):
        return True
    return bool(torch.isin(_addresses(one), _addresses(other)).any())


def _addresses(tensor: Tensor) -> Tensor:
    offsets = torch.zeros((), dtype=torch.long)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = offsets[..., None] + torch.arange(size) * stride
    return tensor.data_ptr() + offsets.reshape(-1) * tensor.element_size()
