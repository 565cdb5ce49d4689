"""The evaluation of a job, between its steps or instead of them: the model in eval mode, tried before it is sent."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from funcpipe.client.prepare.data import check_processes, check_samples, open_with_first, sendable
from funcpipe.client.prepare.loss_calls import trying
from funcpipe.core import Monitor, Plan, Precision, Routes, Validation, stages_of_layers
from funcpipe.core.texts import error_text
from funcpipe.errors import DataError, FuncPipeError
from funcpipe.model.graph import LayerGraph, trace
from funcpipe.model.graph.equivalence import check_batch_sizes
from funcpipe.model.graph.isolation import preserve_state, tried_in_turn
from funcpipe.model.graph.modes import evaluation_mode
from funcpipe.model.graph.program import autocast_to
from funcpipe.model.split import StageModule, split
from funcpipe.model.split.cut import matched_bounds
from funcpipe.model.split.stage import in_eval_mode, kept_names
from funcpipe.model.tensors import is_weightless, stand_in
from funcpipe.training.batches import Step
from funcpipe.training.data import LoadedBatch, MapDataset
from funcpipe.training.data_source import Data, LoaderOptions, PreparedData, StoredData
from funcpipe.training.evaluation import Scores, StageEvaluation, evaluation_batches, named_outputs
from funcpipe.training.losses import LossFunction, loss_of_output
from funcpipe.training.metrics import made_metrics


@dataclass(frozen=True, kw_only=True)
class JobEvaluation:
    """The model in eval mode as layers, and its data.

    A run is validated `every` so many steps, and judged by `monitor`; `every` is 0 where nothing is trained. Without
    `loss`, outputs are compared with nothing. Those of a sample, if they are kept, have `output_bytes`.
    """

    graph: LayerGraph
    dataset: Callable[[], MapDataset]
    samples: int
    loss: LossFunction | None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    every: int = 0
    monitor: Monitor = field(default_factory=Monitor)
    keep_outputs: bool = False
    output_bytes: int = 0
    loading: LoaderOptions = field(default_factory=LoaderOptions)

    def batches(self, plan: Plan) -> tuple[Step, ...]:
        """The batches of the data, in its own order."""
        return evaluation_batches(self.samples, plan).epoch(0)

    def steps_left(self, plan: Plan, *, done: int, steps: int) -> int:
        """The number of batches left to evaluate for a run that has done `done` of its `steps` steps."""
        times = max(steps // self.every - done // self.every, 0) if self.every else 1
        return times * len(self.batches(plan))

    def prepared_data(self) -> PreparedData:
        """The evaluation's data as it is sent. Raises DataError."""
        return sendable(self.dataset, self.loading)

    def stages(
        self, plan: Plan, data: StoredData, routes_of: Callable[[LayerGraph, tuple[int, ...]], Routes]
    ) -> list[StageEvaluation]:
        """The stages of `plan` in eval mode, which load `data`. Raises PlanError if the plan does not fit."""
        bounds = matched_bounds(self.graph, plan)
        routes = routes_of(self.graph, tuple(stages_of_layers(bounds)))
        return [self._stage(stage, routes, data) for stage in split(self.graph, bounds)]

    def _stage(self, stage: StageModule, routes: Routes, data: StoredData) -> StageEvaluation:
        return StageEvaluation(
            stage=stage,
            routes=routes,
            signature=self.graph.signature,
            data=data if stage.inputs or stage.is_last else None,
            samples=self.samples,
            metrics=self.metrics if stage.is_last else {},
            loss=self.loss if stage.is_last else None,
            every=self.every,
            monitor=self.monitor,
            keep_outputs=self.keep_outputs,
        )


def as_validation(given: Validation | Data) -> Validation:
    """Data alone is validated on after every epoch, without metrics."""
    return given if isinstance(given, Validation) else Validation(data=given)


@tried_in_turn
def make_evaluation(
    model: nn.Module,
    data: Data,
    plan: Plan,
    *,
    loss: LossFunction | None,
    metrics: Mapping[str, Any],
    blocks: tuple[str, ...],
    precision: Precision = Precision.FP32,
    every: int = 0,
    monitor: Monitor | None = None,
    keep_outputs: bool = False,
) -> JobEvaluation:
    """Trace `model` in eval mode and `precision`, and try it, the loss and the metrics on the first samples of `data`.

    The model is not changed. Raises ModelError, DataError or InvalidValue.
    """
    metrics = made_metrics(metrics)
    factory, source, opening = open_with_first(data, model, micro_batch=plan.micro_batch)
    if source.drop_last:
        raise DataError(
            "the DataLoader to evaluate on has drop_last=True, but every sample is evaluated, in a smaller last batch; "
            "give a DataLoader without drop_last"
        )
    made, first, collated = source.dataset, opening.batch, opening.collated
    graph = trace(
        *(model, first.args, first.kwargs), blocks=blocks, precision=precision, training=False, collated=collated
    )
    if graph.carried.names:
        raise DataError(
            f"each forward of {graph.name} in eval mode leaves {graph.carried.listed} for the next one, so "
            "that a validation would change what is trained; do that only where self.training is set"
        )
    evaluation = JobEvaluation(
        graph=graph,
        dataset=factory,
        samples=len(made),
        loss=loss,
        metrics=metrics,
        every=every,
        monitor=monitor or Monitor(),
        keep_outputs=keep_outputs,
        loading=source.options,
    )
    dealt = evaluation_batches(len(made), plan)
    inputs = graph.signature.bind(first.args, first.kwargs)
    check_batch_sizes(graph, model, inputs, dealt.micro_batch_sizes, training=False, collated=collated)
    if not hasattr(made, "shard_sizes"):
        check_samples(graph, model, made, source.options.collate, dealt, training=False, cut=collated is None)
    check_processes(graph, factory, source, dealt)
    output_bytes = _try(model, evaluation, first, min(plan.micro_batch, len(made)))
    return replace(evaluation, output_bytes=output_bytes)


def _try(model: nn.Module, evaluation: JobEvaluation, batch: LoadedBatch, samples: int) -> int:
    """Measure one micro-batch as functions will; returns the bytes of a sample's outputs, if they are kept.

    Raises DataError for a loss or a metric that fails on it, and for a loss whose calls depend on those before.
    """
    output_bytes = 0
    loss, scores = evaluation.loss, Scores(evaluation.loss, evaluation.metrics)
    with (
        preserve_state(model),
        evaluation_mode(model),
        in_eval_mode(loss),
        trying(loss or loss_of_output, loss or loss_of_output, seed=0) as calls,
        torch.no_grad(),
        warnings.catch_warnings(),
    ):
        with autocast_to(evaluation.graph.precision):
            output = stand_in(model(*batch.args, **batch.kwargs))
        if evaluation.keep_outputs:
            output_bytes = sum(tensor.nbytes for tensor in named_outputs(output, samples).values()) // samples
        warnings.simplefilter("ignore")  # of metrics that have seen so few samples
        try:
            scores.add(output, batch.target, samples)
            scores.values([scores.part()], loss="loss")
            names = "" if loss is None else kept_names(calls.carried(output, batch.target))
        except FuncPipeError:
            raise
        except Exception as error:
            if is_weightless(model):  # which may be due to the numbers that stand in for its outputs
                return output_bytes
            raise DataError(
                f"the loss or a metric fails on the first {samples} samples: {error_text(error)}"
            ) from error
        if names:
            raise DataError(
                f"each call of the loss in eval mode leaves {names} for the next one, so that a validation "
                "would change what is trained; do that only where self.training is set"
            )
    return output_bytes
