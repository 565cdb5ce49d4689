"""Embeddings with `max_norm`, whose forward rewrites rows of their weight in place."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from funcpipe.errors import ModelError
from funcpipe.model.graph.user_code import current_line, with_code

_WHY = "so that each forward rewrites rows of the weight, which other micro-batches and replicas would not see in time"


def refuse_max_norm(model: nn.Module) -> None:
    """Raise ModelError for a module of `model` that rewrites its rows, even if none is long enough yet."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            title = f"{path} ({type(module).__name__})" if path else type(module).__name__
            norm, kind = module.max_norm, module.norm_type
            if isinstance(module, nn.EmbeddingBag):
                way_out = f"call F.embedding_bag with weight.renorm({kind}, 0, {norm})"
            else:
                way_out = (
                    f"scale what it returns: rows * ({norm} / rows.norm({kind}, -1, keepdim=True).clamp(min={norm}))"
                )
            raise ModelError(f"{title} has max_norm={norm}, {_WHY}; leave max_norm out, and {way_out}")


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
