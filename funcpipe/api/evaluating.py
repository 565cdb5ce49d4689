"""The verbs for a model that is not trained: evaluate it on data, or predict with it, over functions."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch import Tensor

from funcpipe.api.predicting import Predicting
from funcpipe.client.follow.launch import launch
from funcpipe.client.follow.results import RunResult
from funcpipe.client.prepare import arguments
from funcpipe.client.prepare.evaluation import make_evaluation
from funcpipe.client.prepare.job import Job
from funcpipe.client.prepare.prepared_run import prepare
from funcpipe.client.prepare.session import open_session
from funcpipe.core import Bill, FaultTolerance, Monitor, Plan, PlatformSpec, RunLimits, RunSettings, WorkerReport
from funcpipe.core.settings import DEFAULT_FAULTS, DEFAULT_SETTINGS, NO_LIMITS, RunKeywords, settings_with
from funcpipe.core.validation import LOSS
from funcpipe.platforms.catalog import LOCAL, planned_spec
from funcpipe.training.data_source import Data
from funcpipe.training.losses import LossFunction, loss_of_output
from funcpipe.training.recipe import Recipe, check_precision
from funcpipe.worker.deferred_compiler import CompilerDeferred

_NOT_TRAINED = Recipe(loss=loss_of_output, optimizer=functools.partial(torch.optim.SGD, lr=0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """The result of an evaluation over all `samples`: the mean `loss`, each metric by its name, and the cost."""

    run: str
    samples: int
    loss: float
    metrics: Mapping[str, float]
    bill: Bill
    workers: tuple[WorkerReport, ...]


class Evaluating(Predicting):
    """A module that need not be trained; `FuncPipe` says what it is made of."""

    @arguments.strict
    def evaluate(
        self,
        data: Data,
        *,
        metrics: Mapping[str, Any] | None = None,
        platform: str = LOCAL,
        like: str | PlatformSpec | None = None,
        plan: Plan | None = None,
        seed: int = 0,
        faults: FaultTolerance = DEFAULT_FAULTS,
        limits: RunLimits = NO_LIMITS,
        settings: RunSettings = DEFAULT_SETTINGS,
        **keywords: Unpack[RunKeywords],
    ) -> EvaluationResult:
        """Return the mean loss and `metrics` of the module in eval mode, as one process would find them.

        The module is not changed, and no optimiser is needed. Arguments that are not listed are those of `train`, and
        it raises what `train` raises.

        Args:
            data: The data, as in training.
            metrics: Functions or torchmetrics by name, as in `Validation`.
            plan: A plan of `optimize_forward`, or one for training; by default the last one of `optimize`.
        """
        result = self._evaluated(
            data, self._recipe.cast_loss, metrics or {}, platform, like, plan, seed, faults, limits, settings, keywords
        )
        (report,) = result.validations
        values = dict(report.values)
        loss = values.pop(LOSS)
        return EvaluationResult(
            run=result.run, samples=report.samples, loss=loss, metrics=values, bill=result.bill, workers=result.workers
        )

    @arguments.strict
    def predict(
        self,
        data: Data,
        *,
        platform: str = LOCAL,
        like: str | PlatformSpec | None = None,
        plan: Plan | None = None,
        seed: int = 0,
        faults: FaultTolerance = DEFAULT_FAULTS,
        limits: RunLimits = NO_LIMITS,
        settings: RunSettings = DEFAULT_SETTINGS,
        **keywords: Unpack[RunKeywords],
    ) -> dict[str, Tensor]:
        """Return the outputs of the module in eval mode for all samples, in their order, by name.

        An output that is one tensor is called `output`; others have the names of their items or attributes. All must
        fit in this process's memory. Arguments that are not listed are those of `evaluate`.

        Args:
            data: The data, as in training: what follows the inputs, the target, is not read.

        Raises:
            DataError: Outputs are no tensors, or their first dimension is not the batch.
        """
        result = self._evaluated(data, None, {}, platform, like, plan, seed, faults, limits, settings, keywords)
        return dict(result.outputs)

    def _evaluated(
        self,
        data: Data,
        loss: LossFunction | None,
        metrics: Mapping[str, Any],
        platform: str,
        like: str | PlatformSpec | None,
        plan: Plan | None,
        seed: int,
        faults: FaultTolerance,
        limits: RunLimits,
        settings: RunSettings,
        keywords: RunKeywords,
    ) -> RunResult:
        arguments.check_run(faults, limits)
        chosen = self._planned(plan)
        if chosen.estimate is not None:
            check_precision("plan", chosen.precision, self._recipe)
        settings = settings_with(settings, keywords)
        with open_session(platform, like, settings) as session:
            session.expect()
            with CompilerDeferred():
                evaluation = make_evaluation(
                    self.model,
                    data,
                    chosen,
                    loss=loss,
                    metrics=metrics,
                    blocks=tuple({*self._blocks, *chosen.blocks}),
                    precision=self._recipe.precision,
                    monitor=Monitor(keep_best=0),
                    keep_outputs=loss is None,
                )
            job = Job(
                graph=evaluation.graph,
                plan=replace(chosen, shard_optimizer=False),
                recipe=replace(_NOT_TRAINED, loss=self._recipe.loss, precision=self._recipe.precision),
                dataset=evaluation.dataset,
                samples=chosen.global_batch,  # of which none is trained on
                epochs=0,
                seed=seed,
                shuffle=False,
                message_deadline_s=settings.message_deadline_s,
                prices=settings.prices or self._spec or planned_spec(chosen),
                evaluation=evaluation,
                weights=self._weights,
            )
            return launch(prepare(job, session, faults=faults, limits=limits, settings=settings))
