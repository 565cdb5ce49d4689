"""A stage of a run as it is sent to functions."""

from dataclasses import dataclass

from torch import Tensor

from funcpipe.model.split import StageModule


@dataclass(frozen=True, kw_only=True)
class PreparedStage:
    """A stage that can be sent: the module, its code as bytes, and its tensors by name."""

    module: StageModule
    bundle: bytes
    tensors: dict[str, Tensor]
