"""Measurements of a model in eval mode by the last stage: the loss and metrics, in parts that add up exactly.

A part holds the sums over some micro-batches, as tensors by name, and what metrics keep (`metrics.py`). Parts combine
to what one pass over all of the data would have measured:

    samples                 how many
    loss                    the sum of the loss over samples, in double precision
    weight                  what the sum is to be divided by: the samples, or the weights that the loss returns
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from funcpipe.training.metrics import Part, made_metrics, measure_of, one_number, total
from funcpipe.training.recipe import LossFunction


class Scores:
    """Adds up the loss and the metrics of micro-batches, part by part."""

    def __init__(self, loss: LossFunction | None, metrics: Mapping[str, Any]) -> None:
        """`loss` is None where nothing is compared with a target."""
        self._loss = loss
        self._measures = {name: measure_of(name, metric) for name, metric in made_metrics(metrics).items()}
        self.begin()

    def begin(self) -> None:
        """Begin a new part."""
        self._samples = 0
        self._sums = {"loss": 0.0, "weight": 0.0}
        for measure in self._measures.values():
            measure.begin()

    def add(self, output: Any, target: Any, samples: int) -> None:
        """Add a micro-batch of so many samples. Raises DataError for a loss or metric that is not one number."""
        self._samples += samples
        if self._loss is not None:
            found = self._loss(output, target)
            if isinstance(found, tuple):
                loss_sum, weight = found[0].item(), found[1]
            else:
                loss_sum, weight = one_number("the loss function", found) * samples, float(samples)
            self._sums["loss"] += loss_sum
            self._sums["weight"] += weight
        for measure in self._measures.values():
            measure.add(output, target, samples)

    def part(self) -> Part:
        """Return the sums since the part began."""
        part = {"samples": torch.tensor(self._samples)}
        part |= {name: torch.tensor(found, dtype=torch.float64) for name, found in self._sums.items()}
        for measure in self._measures.values():
            part |= measure.part()
        return part

    def values(self, parts: Sequence[Part], *, loss: str) -> tuple[int, dict[str, float]]:
        """The number of samples in all `parts`, the mean loss under the name `loss`, and each metric by its own."""
        samples = sum(int(part["samples"]) for part in parts)
        found = {}
        if self._loss is not None:
            weight = total(parts, "weight")
            found[loss] = total(parts, "loss") / weight if weight else math.nan
        return samples, found | {name: measure.value(parts, samples) for name, measure in self._measures.items()}
