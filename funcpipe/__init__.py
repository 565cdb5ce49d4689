"""Train PyTorch models on serverless functions: profiled, planned, pipelined, predicted.

`FuncPipe` is loaded when it is first used, so that planning on the command line does not load torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from funcpipe.api import FuncPipe

__all__ = ["FuncPipe"]


def __getattr__(name: str) -> Any:
    if name == "FuncPipe":
        from funcpipe.api import FuncPipe

        return FuncPipe
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
