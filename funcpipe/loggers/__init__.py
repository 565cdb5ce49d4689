"""Loggers of a run's progress: a bar in a terminal or a notebook, CSV files, TensorBoard, MLflow, W&B.

Each is a `Callback`, for `callbacks=` of `FuncPipe.train`, in a file of its own; libraries are imported when used.
"""

import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from funcpipe.client.follow.callbacks import Callback
    from funcpipe.loggers.csv_logger import CSVLogger
    from funcpipe.loggers.mlflow_logger import MLflowLogger
    from funcpipe.loggers.progress_bar import ProgressBar
    from funcpipe.loggers.tensorboard_logger import TensorBoardLogger
    from funcpipe.loggers.wandb_logger import WandbLogger

__all__ = ["CSVLogger", "MLflowLogger", "ProgressBar", "TensorBoardLogger", "WandbLogger"]

_MODULES = {
    "CSVLogger": "csv_logger",
    "MLflowLogger": "mlflow_logger",
    "ProgressBar": "progress_bar",
    "TensorBoardLogger": "tensorboard_logger",
    "WandbLogger": "wandb_logger",
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
        from funcpipe.loggers.progress_bar import ProgressBar

        if not any(isinstance(callback, ProgressBar) for callback in given):
            given.insert(0, ProgressBar())
    return given
