"""A stage in eval mode: forwards alone, without gradients, of which the last stage measures the results.

It shares its parameters, buffers and modules with the stage in training, and leaves them as they are. The last stage
measures the loss and metrics, in parts that add up exactly. A part holds the sums over some micro-batches, as tensors
by name, and what metrics keep (`metrics.py`). Parts combine to what one pass over all of the data would have measured:

    samples                 how many
    loss                    the sum of the loss over samples, in double precision
    weight                  what the sum is to be divided by: the samples, or the weights that the loss returns
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.core import Monitor, Plan, Routes
from funcpipe.errors import DataError
from funcpipe.model.draws import SHARED_GENERATORS
from funcpipe.model.graph import Signature
from funcpipe.model.graph.program import attribute
from funcpipe.model.split import StageModule
from funcpipe.model.split.stage import in_eval_mode
from funcpipe.model.tensors import flatten
from funcpipe.training.batches import Batches, Step
from funcpipe.training.data_source import StoredData
from funcpipe.training.device import HOST, Device
from funcpipe.training.losses import LossFunction, seed_loss
from funcpipe.training.metrics import Part, made_metrics, measure_of, one_number, total
from funcpipe.training.passes import Batch


class Scores:
    """Adds up the loss and the metrics of micro-batches, part by part."""

    def __init__(self, loss: LossFunction | None, metrics: Mapping[str, Any], device: Device = HOST) -> None:
        """`loss` is None where nothing is compared with a target. It computes on `device`, and metrics on the host."""
        self._loss = loss
        self._device = device
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
        if self._measures:
            output, target = self._device.read((output, target))
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


@dataclass(frozen=True, kw_only=True)
class StageEvaluation:
    """The parts of a stage's evaluation: itself in eval mode, its routes to others, and the data it loads, if any.

    A run is validated `every` so many steps, and judged by `monitor`; `every` is 0 for a run that only evaluates.
    With `keep_outputs` the model's outputs are kept.
    """

    stage: StageModule
    routes: Routes
    signature: Signature
    data: StoredData | None
    samples: int
    metrics: Mapping[str, Any]
    loss: LossFunction | None
    every: int
    monitor: Monitor
    keep_outputs: bool = False

    def batches(self, plan: Plan) -> Batches:
        """Return the batches of the data, in its own order, cut into micro-batches as in training."""
        return evaluation_batches(self.samples, plan)

    def previous(self, step: int) -> int:
        """Return the step of the validation before the one after `step` steps; 0 if there is none."""
        return step - self.every if self.every else 0


def evaluation_batches(samples: int, plan: Plan) -> Batches:
    """Return so many samples in their order, in batches and micro-batches as `plan` has them; the last are short."""
    batch = min(plan.global_batch, samples)
    return Batches(samples=samples, global_batch=batch, micro_batch=plan.micro_batch, seed=0, shuffle=False)


def named_outputs(output: Any, samples: int) -> dict[str, Tensor]:
    """Return the tensors of a model's output for so many samples, by name; one alone is called `output`.

    Raises DataError for an output that is no tensor, or whose first dimension is not the batch.
    """
    leaves, tree = flatten(output)
    if isinstance(output, Tensor):
        found: dict[str, Any] = {"output": output}
    else:
        found = {path.removeprefix("."): leaf for path, leaf in zip(tree.paths(""), leaves, strict=True)}
        found = {name: leaf for name, leaf in found.items() if leaf is not None}
    for name, leaf in found.items():
        if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.size(0) != samples:
            what = f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
            raise DataError(
                f"the model's output {name} is {what} for {samples} samples; predict needs tensors whose first "
                "dimension is the batch: wrap the model in a module that returns only those"
            )
    return found


class Evaluation:
    """One replica's forwards in eval mode. In the last stage `scores` add up; `outputs`, if they are kept, are those of
    a batch, by micro-batch and name.
    """

    def __init__(
        self,
        stage: StageModule,
        *,
        scores: Scores | None,
        seed: int,
        keep_outputs: bool = False,
        device: Device = HOST,
    ) -> None:
        """`scores` is None in all stages but the last. The stage is on `device`, what is received or taken is not."""
        self._device = device
        self._stage = stage
        self._seed = seed
        self._received: dict[int, dict[str, Tensor]] = {}
        self._sent: dict[int, dict[str, Tensor]] = {}
        self._computed: dict[int, Any] = {}
        self._keep_outputs = keep_outputs
        self.scores = scores
        self.outputs: dict[str, Tensor] = {}

    def begin(self, step: Step, load: Callable[[int], Batch]) -> None:
        """Begin the batch `step`, of which `load` loads a micro-batch."""
        self._step = step
        self._load = load
        self._received, self._sent, self._computed, self.outputs = {}, {}, {}, {}
        if self.scores is not None:
            self.scores.begin()

    def receive_activation(self, micro_batch: int, tensors: Mapping[str, Tensor]) -> None:
        """Keep values from an earlier stage for the forward of `micro_batch`."""
        self._received.setdefault(micro_batch, {}).update(self._device.receive(tensors))

    def forward(self, micro_batch: int) -> None:
        """Compute what later stages need of `micro_batch` and, in the last stage, add it to the scores."""
        values, target = self._received.pop(micro_batch, {}), None
        samples = len(self._step.micro_batches[micro_batch])
        with torch.no_grad():
            if self._stage.inputs or self._stage.is_last:
                inputs, target = self._device.given(self._load(micro_batch))
                values |= {name: inputs[name] for name in self._stage.inputs}
            seed = (self._seed, -1 - self._step.number, micro_batch)  # no step of training has this number
            self._sent[micro_batch], output = self._stage(values, seed)
            self._computed[micro_batch] = self._device.computed()
            if self.scores is not None:
                with SHARED_GENERATORS.computing():
                    seed_loss(*seed)
                    self.scores.add(output, target, samples)
            if self._keep_outputs and self._stage.is_last:
                named = self._device.to_host(named_outputs(output, samples))
                self.outputs |= {f"{micro_batch}/{name}": tensor for name, tensor in named.items()}

    def take_activations(self, micro_batch: int, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the values `names` from the forward of `micro_batch`, to be sent; they are no longer held here."""
        sent = self._sent[micro_batch]
        return self._device.send({name: sent.pop(name) for name in names}, self._computed[micro_batch])


@contextlib.contextmanager
def evaluating(evaluation: StageEvaluation, trained: StageModule) -> Iterator[None]:
    """Within this context the stage of `evaluation` is in the modes of its tracing in eval mode, its loss in eval mode,
    and it has the buffers of `trained`.
    """
    stage = evaluation.stage
    held = dict(trained.named_buffers(remove_duplicate=False))
    for name, buffer in list(stage.named_buffers(remove_duplicate=False)):
        if name in held and held[name] is not buffer:
            path, _, key = name.rpartition(".")
            owner: nn.Module = attribute(stage, path) if path else stage
            owner._buffers[key] = held[name]
    stage.eval()
    stage.set_traced_modes()
    try:
        with in_eval_mode(evaluation.loss):
            yield
    finally:
        trained.train()
