"""The base of all parts of composed models.

A part maps activations (batch, length, `WIDTH`) to others of the same shape; it also sees the model's other inputs. So
any part can follow any other.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 4
WORDS = 11


@dataclass
class Inputs:
    """The inputs of a part besides the activations: words (batch, length) and which of them count."""

    words: Tensor
    mask: Tensor


class Part(nn.Module):
    """A part with a linear layer, which most of them use."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        return x + torch.tanh(self.inner(x))


def parts_in(namespace: Mapping[str, Any]) -> tuple[type[nn.Module], ...]:
    """The parts that a module defines: its public classes of modules."""
    mine = [kind for kind in namespace.values() if getattr(kind, "__module__", None) == namespace["__name__"]]
    return tuple(
        kind for kind in mine if isinstance(kind, type) and issubclass(kind, nn.Module) and kind.__name__[0] != "_"
    )
