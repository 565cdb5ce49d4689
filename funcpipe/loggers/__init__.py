"""Loggers of a run's progress: a bar in a terminal or a notebook, files of steps and models, TensorBoard, MLflow, W&B.

Each is a `Callback`, for `callbacks=` of `FuncPipe.train`, in `local` or `trackers`; libraries are imported when used.
"""

import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from funcpipe.client.follow.callbacks import Callback
    from funcpipe.loggers.local import CheckpointFiles, CSVLogger, ProgressBar
    from funcpipe.loggers.trackers import MLflowLogger, TensorBoardLogger, WandbLogger

__all__ = ["CSVLogger", "CheckpointFiles", "MLflowLogger", "ProgressBar", "TensorBoardLogger", "WandbLogger"]

_MODULES = {
    "CSVLogger": "local",
    "CheckpointFiles": "local",
    "MLflowLogger": "trackers",
    "ProgressBar": "local",
    "TensorBoardLogger": "trackers",
    "WandbLogger": "trackers",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def with_bar(callbacks: "Iterable[Callback]", wanted: bool) -> "list[Callback]":
    """`callbacks`, after one that shows a bar if it is `wanted`, and none of them shows one."""
    given = list(callbacks)
    if wanted:
        from funcpipe.loggers.local import ProgressBar

        if not any(isinstance(callback, ProgressBar) for callback in given):
            given.insert(0, ProgressBar())
    return given
