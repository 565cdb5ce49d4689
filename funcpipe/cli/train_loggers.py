"""The loggers of `funcpipe train --log KIND:WHERE`."""

from collections.abc import Sequence

from funcpipe import loggers
from funcpipe.client.follow.callbacks import Callback
from funcpipe.errors import InputError

KINDS = ("csv", "tensorboard", "mlflow", "wandb")


def callbacks(logs: Sequence[str], *, quiet: bool) -> list[Callback]:
    """A progress bar unless it is to be `quiet`, and the loggers that `logs` name. Raises InputError."""
    return [*([] if quiet else [loggers.ProgressBar()]), *(_logger(text) for text in logs)]


def _logger(text: str) -> Callback:
    kind, colon, where = text.partition(":")
    if kind not in KINDS or not colon or not where:
        kinds = ", ".join(f"{name}:…" for name in KINDS)
        raise InputError(f"--log must be one of {kinds}, such as csv:losses.csv, got {text!r}")
    match kind:
        case "csv":
            return loggers.CSVLogger(where)
        case "tensorboard":
            return loggers.TensorBoardLogger(where)
        case "mlflow":
            return loggers.MLflowLogger(where)
        case _:
            return loggers.WandbLogger(where)
