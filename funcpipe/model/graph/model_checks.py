"""What a model must be, before it is traced."""

from collections.abc import Sequence

from torch import nn
from torch.nn.modules import module as modules_of_torch

from funcpipe.errors import ModelError
from funcpipe.model.graph.user_code import class_and_line
from funcpipe.model.tensors import is_dense


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
"""Where torch keeps the hooks of all modules of a process, what registers them, and what does so for one module."""


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
