"""State that a stage's forwards leave for the next ones, kept right although a pipeline runs them ahead of backwards.

One process runs F0 B0 F1 B1; a stage may run F0 F1 B0 B1. So each forward works on copies: tensors that F0 saved for B0
stay as they were while F1 changes its own in place. Recomputation runs F0 again for B0, with what F0 had begun with,
and what F1 has left by then is put back afterwards.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from funcpipe.model.graph import Statistic
from funcpipe.model.graph.program import attribute
from funcpipe.model.split import StageModule
from funcpipe.model.split.module_state import decode_attributes, read_attributes, write_attributes


@dataclass(frozen=True)
class _Values:
    """Attributes as plain data with their tensors, and buffers by name: those of the module, not copies."""

    attributes: dict[str, Any]
    tensors: dict[str, Tensor]
    buffers: dict[str, Tensor]


class CarriedValues:
    """The attributes and buffers that the forwards of a stage leave for the next ones; many stages have none."""

    def __init__(self, stage: StageModule, statistics: Sequence[Statistic] = (), *, recompute: bool) -> None:
        """The buffers of `statistics` are among these. With `recompute`, what each forward begins with is kept for its
        second run.
        """
        self._stage = stage
        self._recompute = recompute
        averaged = {id(attribute(stage, name)) for item in statistics for name in item.buffers}
        named = stage.named_buffers(remove_duplicate=False)
        self._buffers = (*stage.carried.buffers, *(name for name, buffer in named if id(buffer) in averaged))
        self._any = bool(stage.carried.blocks or self._buffers)
        self._before: dict[int, _Values] = {}
        self._start: _Values | None = None

    def begin_step(self) -> None:
        """Forget what the forwards of the step before began with; what this one begins with is kept, uncopied."""
        self._before = {}
        self._start = self._read() if self._any else None

    def undo_step(self) -> None:
        """Go back to what the step began with."""
        if self._start is not None:
            self._write(self._start)

    def before_forward(self, micro_batch: int) -> None:
        """Let the forward of `micro_batch` work on copies."""
        if not self._any:
            return
        values = self._read()
        self._write(values)
        if self._recompute:
            self._before[micro_batch] = values

    @contextlib.contextmanager
    def recomputing(self, micro_batch: int) -> Iterator[None]:
        """Within this context, the stage has what the forward of `micro_batch` began with."""
        if not self._any:
            yield
            return
        now = self._read()
        self._write(self._before.pop(micro_batch))
        try:
            yield
        finally:
            self._write(now)

    def _read(self) -> _Values:
        carried, tensors = self._stage.carried, dict[str, Tensor]()
        attributes = read_attributes(self._stage, carried.blocks, carried.attributes, tensors)
        buffers: dict[str, Tensor] = {name: attribute(self._stage, name) for name in self._buffers}
        return _Values(attributes, tensors, buffers)

    def _write(self, values: _Values) -> None:
        """Give the stage copies of `values`."""
        write_attributes(self._stage, decode_attributes(values.attributes, values.tensors))
        copies: dict[int, Tensor] = {}
        for name, buffer in values.buffers.items():
            path, _, key = name.rpartition(".")
            owner: nn.Module = attribute(self._stage, path) if path else self._stage
            owner._buffers[key] = copies.setdefault(id(buffer), buffer.detach().clone())
