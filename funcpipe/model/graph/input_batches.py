"""Batches of a model's inputs with as many samples as tracing asks for: cut from the user's sample, or collated anew.

Where the first dimension of the inputs is the batch, a few samples of it are a batch too. Graphs in one tensor, packed
sequences and sequences that begin with time cannot be cut like that: only the user's collate function makes batches.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from funcpipe.model.graph.signature import Signature, batch_of, resized


class Collated(Protocol):
    """Samples at hand, of which a collate function makes batches; the user's own batch has so many `samples`."""

    @property
    def samples(self) -> int:
        """How many samples the user's own batch has."""

    def arguments(self, samples: int, offset: int) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """The arguments of a call with so many samples, which begin at `offset` among those at hand."""


class InputBatches(Protocol):
    """Makes inputs of a model, by name; the user's sample has so many `samples`."""

    @property
    def samples(self) -> int:
        """How many samples the user's own sample has."""

    def batch(self, samples: int, offset: int = 0) -> dict[str, Tensor]:
        """The inputs for so many samples, beginning at `offset`."""

    def others(self, inputs: Mapping[str, Tensor], samples: int) -> dict[str, Tensor]:
        """Inputs for as many samples as `inputs`, but not the same ones."""


@dataclass(frozen=True)
class CutBatches:
    """Rows of the user's `inputs`, cut or repeated along the first dimension."""

    inputs: Mapping[str, Tensor]

    @property
    def samples(self) -> int:
        """The size of the first dimension."""
        return batch_of(self.inputs) or 1

    def batch(self, samples: int, offset: int = 0) -> dict[str, Tensor]:
        """So many rows, beginning at `offset`."""
        return resized(self.inputs, samples, offset=offset)

    def others(self, inputs: Mapping[str, Tensor], samples: int) -> dict[str, Tensor]:
        """The same rows in another order."""
        return resized(inputs, samples, offset=1)


@dataclass(frozen=True)
class CollatedBatches:
    """Batches that the user's collate function makes."""

    signature: Signature
    collated: Collated

    @property
    def samples(self) -> int:
        """How many samples were collated."""
        return self.collated.samples

    def batch(self, samples: int, offset: int = 0) -> dict[str, Tensor]:
        """So many samples, collated; raises DataError for inputs that the model was not traced for."""
        return self.signature.bind(*self.collated.arguments(samples, offset))

    def others(self, inputs: Mapping[str, Tensor], samples: int) -> dict[str, Tensor]:
        """Other samples, collated."""
        return self.batch(samples, offset=samples)
