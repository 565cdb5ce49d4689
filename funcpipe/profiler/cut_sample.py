"""A micro-batch cut from the tensors that a user gives as a sample, where they determine the number of samples."""

import contextlib
from collections.abc import Iterator, Mapping

from torch import Tensor

from funcpipe.core.texts import error_text
from funcpipe.errors import DataError, FuncPipeError
from funcpipe.model.graph import LayerGraph
from funcpipe.model.graph.inputs import resized
from funcpipe.model.graph.symbols import BATCH

_WAY_OUT = (
    "Tensors whose first dimension is not the batch (graphs in one tensor, packed sequences, time first) do not tell "
    "how many samples they hold: give profile the DataLoader as sample_inputs, whose collate_fn makes micro-batches"
)


def cut_sample(graph: LayerGraph, inputs: Mapping[str, Tensor], micro_batch: int) -> dict[str, Tensor]:
    """Return so many samples of `inputs`, cut or repeated along the first dimension. Raises DataError."""
    if graph.output_sizes and BATCH not in graph.output_sizes:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in inputs.items())
        raise DataError(
            f"the output of {graph.name} does not grow with the first dimension of the sample ({shapes}), but with "
            f"another one. {_WAY_OUT}"
        )
    return resized(inputs, micro_batch)


@contextlib.contextmanager
def cutting(graph: LayerGraph, micro_batch: int) -> Iterator[None]:
    """Raise DataError for a layer that fails on samples that were cut."""
    try:
        yield
    except FuncPipeError:
        raise
    except Exception as error:
        raise DataError(
            f"{graph.name} takes the sample, but fails on {micro_batch} samples cut from it along the first dimension: "
            f"{error_text(error)}. {_WAY_OUT}"
        ) from error
