"""A stage in eval mode: forwards alone, without gradients, of which the last stage measures the results.

It shares its parameters, buffers and modules with the stage in training, and leaves them as they are.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from funcpipe.training.data import Batches, Step
from funcpipe.training.passes import Batch
from funcpipe.training.recipe import LossFunction
from funcpipe.training.rng import seed_loss
from funcpipe.training.scores import Scores
from funcpipe.training.stored_data import StoredData


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

    def __init__(self, stage: StageModule, *, scores: Scores | None, seed: int, keep_outputs: bool = False) -> None:
        """`scores` is None in all stages but the last."""
        self._stage = stage
        self._seed = seed
        self._received: dict[int, dict[str, Tensor]] = {}
        self._sent: dict[int, dict[str, Tensor]] = {}
        self._keep_outputs = keep_outputs
        self.scores = scores
        self.outputs: dict[str, Tensor] = {}

    def begin(self, step: Step, load: Callable[[int], Batch]) -> None:
        """Begin the batch `step`, of which `load` loads a micro-batch."""
        self._step = step
        self._load = load
        self._received, self._sent, self.outputs = {}, {}, {}
        if self.scores is not None:
            self.scores.begin()

    def receive_activation(self, micro_batch: int, tensors: Mapping[str, Tensor]) -> None:
        """Keep values from an earlier stage for the forward of `micro_batch`."""
        self._received.setdefault(micro_batch, {}).update(tensors)

    def forward(self, micro_batch: int) -> None:
        """Compute what later stages need of `micro_batch` and, in the last stage, add it to the scores."""
        values, target = self._received.pop(micro_batch, {}), None
        samples = len(self._step.micro_batches[micro_batch])
        with torch.no_grad():
            if self._stage.inputs or self._stage.is_last:
                inputs, target = self._load(micro_batch)
                values |= {name: inputs[name] for name in self._stage.inputs}
            seed = (self._seed, -1 - self._step.number, micro_batch)  # no step of training has this number
            self._sent[micro_batch], output = self._stage(values, seed)
            if self.scores is not None:
                with SHARED_GENERATORS.computing():
                    seed_loss(*seed)
                    self.scores.add(output, target, samples)
            if self._keep_outputs and self._stage.is_last:
                named = named_outputs(output, samples)
                self.outputs |= {f"{micro_batch}/{name}": tensor for name, tensor in named.items()}

    def take_activations(self, micro_batch: int, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the values `names` from the forward of `micro_batch`, to be sent; they are no longer held here."""
        sent = self._sent[micro_batch]
        return {name: sent.pop(name) for name in names}


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
