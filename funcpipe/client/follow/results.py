"""The progress and the result of a run, read from storage."""

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from torch import Tensor, nn

from funcpipe.client.follow.export import TrainedLoss, write_trained
from funcpipe.client.follow.functions import unwatched_functions
from funcpipe.client.prepare.job import Learned
from funcpipe.core import (
    DEFAULT_STORES,
    Bill,
    CountsByKind,
    PlatformSpec,
    Source,
    Stores,
    Trace,
    ValidationReport,
    WorkerReport,
    prices_of,
    store_bills,
)
from funcpipe.core.texts import Described
from funcpipe.errors import InvalidValue, RunUnknown
from funcpipe.model.split.module_state import Attributes
from funcpipe.platforms.function_group import WatchedFunction
from funcpipe.runstate.reader import RunReader, reported_requests, request_usd, spent_so_far
from funcpipe.scheduler.clocks import aligned
from funcpipe.training.losses import LossFunction
from funcpipe.training.state import MODEL, StageState, tensor_names
from funcpipe.training.state_dict import StateDict


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a run: `step` of `steps` has ended, with the mean `loss` over its samples.

    Of more than eight replicas it is the loss of the first eight.
    `samples_per_s` is what this client has seen since the first step that it waited for. `cost_usd` is what the run has
    cost since it was first started: its functions' time, their requests as last reported, and this client's.
    `elapsed_s` is how long it has taken. Of the steps, `skipped` updated nothing, as their gradients were not finite.
    `learning_rate` is that of the optimiser's first parameter group in the step; None where it is not known, as of a
    run that was collected before, or if the last stage trains no parameters. Where the model was validated after the
    step, that is reported once more, with the `validation`; callbacks get it by `on_validation`.
    """

    step: int
    steps: int
    loss: float
    samples_per_s: float
    cost_usd: float
    elapsed_s: float = 0.0
    skipped: int = 0
    learning_rate: float | None = None
    validation: ValidationReport | None = None


OnProgress = Callable[[Progress], None]


NOTHING_LEARNED = StageState(tensors={}, aliases={}, transient=frozenset(), settings={})
"""The state of a run that has only evaluated."""


def ignore_progress(progress: Progress) -> None:
    """Do nothing when a step has ended."""


@dataclass(frozen=True, kw_only=True, repr=False)
class RunResult(Described):
    """The result of a run: the mean loss of each step, the trained tensors under the model's names, the bill.

    `attributes` are the Python attributes that forwards of the model change for the next ones, by module and name;
    `averaged` are the tensors with the average over steps in place of what was averaged, empty without an average.
    `learned` is all of the last checkpoint. `skipped_steps` are the numbers, from 0,
    of steps that updated nothing, as their gradients were not finite. `callback_errors` are the exceptions that
    callbacks have raised, of each the first. `validations` are in the order of their steps, and `best_models` the
    models of the best of them that were kept, by step, the best one first. `loss` is what was trained of the loss.
    `outputs` are those of a model that predicts, for all samples in their order.
    `start_s` are the seconds from the invocation of each worker's last function to its first line, where known.
    """

    run: str
    losses: tuple[float, ...]
    tensors: Mapping[str, Tensor]
    trace: Trace
    bill: Bill
    workers: tuple[WorkerReport, ...]
    attributes: Attributes = field(default_factory=dict)
    averaged: Mapping[str, Tensor] = field(default_factory=dict)
    learned: StageState | None = field(default=None, repr=False)
    skipped_steps: tuple[int, ...] = ()
    callback_errors: tuple[Exception, ...] = ()
    validations: tuple[ValidationReport, ...] = ()
    best_models: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)
    loss: TrainedLoss = field(default_factory=TrainedLoss)
    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    start_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def best_step(self) -> int | None:
        """The number of steps after which the validation was the best; None if there was none."""
        return self.validations[-1].best_step if self.validations else None

    def best_state_dict(self, step: int | None = None) -> Mapping[str, Tensor]:
        """The parameters and buffers of the model with the best validation, or the one of `best_models` after `step`.

        Raises RunUnknown if it was not kept.
        """
        wanted = self.best_step if step is None else step
        if wanted is None or wanted not in self.best_models:
            after = "" if step is None else f" after step {step}; the best are those after {list(self.best_models)}"
            raise RunUnknown(
                f"run {self.run} has kept no best model{after}; train with validation=Validation(data=…, keep_best=1)"
            )
        return self._with(self.best_models[wanted])

    def state_dict(self) -> Mapping[str, Tensor]:
        """The trained model's parameters and buffers, for its `load_state_dict`.

        Of a model by its `weights=`, they are read from where they lie when they are asked for: what was frozen from
        the files, all else from the run in the storage that was given, until it is cleaned.
        """
        return self._with({})

    def optimizer_state_dict(self) -> Mapping[str, Any]:
        """What the optimiser keeps, as "state.PARAMETER.KEY" and "param_groups.PARAMETER.KEY".

        That is the form of `get_optimizer_state_dict` in `torch.distributed.checkpoint.state_dict` if it is flattened;
        `set_optimizer_state_dict` there gives it to an optimiser. Tensors are read as those of `state_dict` are. Of
        replicas that train alone it is the first one's. Raises ModelError for an optimiser that keeps more than tensors
        and plain values.
        """
        tensors, others = (self.learned or NOTHING_LEARNED).optimizer_state_dict()
        return ChainMap(others, cast(dict[str, Any], tensors))

    def _with(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The trained tensors with others under the names of these."""
        if isinstance(self.tensors, StateDict):
            return self.tensors.replaced(tensors)
        return {**self.tensors, **tensors}

    def loss_state_dict(self) -> dict[str, Tensor]:
        """The trained loss's parameters and buffers, for its `load_state_dict`; of a function, its parameters by path.

        Those of a loss that holds nothing that is trained are left out.
        """
        return dict(self.loss.tensors)

    def with_all_of(self, tensors: Mapping[str, Tensor], loss: LossFunction) -> "RunResult":
        """This result with all `tensors` of the trained model, and all of `loss`, those too that no function holds."""
        averaged = {name: self.averaged.get(name, tensor) for name, tensor in tensors.items()}
        averaged = averaged if self.averaged else {}
        return replace(self, tensors=dict(tensors), averaged=averaged, loss=self.loss.with_all_of(loss))

    def averaged_state_dict(self) -> Mapping[str, Tensor]:
        """The averaged parameters, with what is not averaged as it was last. Raises InvalidValue without an average."""
        if not self.averaged:
            raise InvalidValue("average", None, "must be given to FuncPipe, such as average=EMA(decay=0.999)")
        return self._with(self.averaged)


def collect(
    reader: RunReader,
    prices: PlatformSpec,
    *,
    steps: int,
    losses: tuple[float, ...],
    skipped_steps: tuple[int, ...] = (),
    watched: Sequence[WatchedFunction] = (),
    trained: StageState | None = None,
    validations: tuple[ValidationReport, ...] = (),
    outputs: Mapping[str, Tensor] | None = None,
    opened: bool = False,
) -> RunResult:
    """The result of a run whose workers have all done `steps` steps.

    The bill counts all functions of the run, those too that this client has not `watched`, but not this client's own
    requests, which are not over yet (`Bill.with_client`). What was learned is read from storage unless it is `trained`,
    and so is the best model of its `validations`; or both are only `opened`.
    """
    storage, keys, record, reports = reader.storage, reader.keys, reader.record, reader.workers
    functions, stores = [*watched, *unwatched_functions(storage, keys, watched)], record.plan.stores
    trained, best = trained or reader.model(steps, opened=opened), reader.best_models(validations, opened=opened)
    lasts_s = spent_so_far(storage, record).elapsed_s - record.elapsed_s if prices.stores_usd_h(stores) else 0.0
    return RunResult(
        run=keys.run,
        losses=losses,
        tensors=trained.state_dict(),
        trace=load_trace(reader, prices),
        bill=bill(
            functions,
            reports,
            reported_requests(storage, keys, reports),
            prices,
            stores=stores,
            lasted_s=lasts_s,
            earlier_usd=record.spent_usd,
        ),
        workers=reports,
        attributes=trained.attributes(),
        averaged=trained.averaged_state_dict(),
        learned=trained,
        skipped_steps=skipped_steps,
        validations=validations,
        best_models={step: model.state_dict() for step, model in best.items()},
        loss=TrainedLoss.of(trained, next(iter(best.values()), None)),
        outputs=outputs or {},
        start_s=_starts_s(functions, reports),
    )


def _starts_s(functions: Sequence[WatchedFunction], reports: Sequence[WorkerReport]) -> dict[str, float]:
    """Seconds from the invocation of each worker's last function to its first line, by the clocks of both."""
    invoked_s: dict[tuple[str, int], float] = {}
    for function in functions:
        started = function.started
        attempt = started.worker, started.attempt
        invoked_s[attempt] = max(started.started_at_s, invoked_s.get(attempt, 0.0))
    return {
        report.worker: max(report.started_at_s - began_s, 0.0)
        for report in sorted(reports, key=lambda report: report.attempt)
        if (began_s := invoked_s.get((report.worker, report.attempt), 0.0))
    }


def bill(
    functions: Sequence[WatchedFunction],
    reports: Sequence[WorkerReport],
    requests: CountsByKind,
    prices: PlatformSpec,
    *,
    stores: Stores = DEFAULT_STORES,
    lasted_s: float = 0.0,
    earlier_usd: float,
) -> Bill:
    """The bill of functions that have all ended, and of their `requests` to `stores`.

    A store that costs by the hour is paid for `lasted_s`.

    A function that has left a report says itself how long it ran. Of several functions that were started as one
    attempt, the report is the last one's. One that reported counts though it is not among the functions: its
    starter died before that was recorded.
    """
    alive_s = {(report.worker, report.attempt): report.alive_s for report in reports}
    in_order = sorted(functions, key=lambda function: function.started.started_at_s)
    last = {(function.started.worker, function.started.attempt): function for function in in_order}

    def seconds_of(function: WatchedFunction) -> float:
        attempt = function.started.worker, function.started.attempt
        return (alive_s.get(attempt) if last[attempt] is function else None) or function.seconds()

    lifetimes = [(seconds_of(function), function.started.usd_s) for function in functions]
    lifetimes += [(one.alive_s, one.usd_s) for one in reports if (one.worker, one.attempt) not in last]
    return Bill(
        platform=prices.name,
        prices_note=prices.prices_note(stores),
        functions=len(lifetimes),
        function_seconds=sum(seconds for seconds, _ in lifetimes),
        puts=requests.total.puts,
        lists=requests.total.lists,
        gets=requests.total.gets,
        compute_usd=sum(seconds * usd_s for seconds, usd_s in lifetimes),
        request_usd=request_usd(requests, prices, stores, functions=len(lifetimes)),
        earlier_usd=earlier_usd,
        hours_usd=prices.stores_usd_h(stores) / 3600 * lasted_s,
        lasted_s=lasted_s,
        stores=store_bills(requests, prices, stores, lasted_s=lasted_s),
    )


def load_trace(reader: RunReader, prices: PlatformSpec) -> Trace:
    """The events of the last steps, by one clock that begins at second 0."""
    events, samples = reader.events()
    return Trace(
        run=reader.keys.run,
        source=Source.EXECUTED,
        events=aligned(events),
        prices=prices_of(reader.record.plan, prices),
        samples=samples,
    ).from_zero()


def write_back(result: RunResult, model: nn.Module, loss: LossFunction, epochs: int) -> Learned | None:
    """Write what a run of `epochs` epochs leaves into `model` and `loss`; returns the state for the next one.

    The tensors of the model are not held twice.
    """
    learned = result.learned
    write_trained(model, result.tensors, result.attributes, learned)
    result.loss.write_to(loss)
    if learned is None:
        return None
    own = tensor_names(model)[0]
    held = {MODEL + name: tensor.detach() for name, tensor in own.items()}
    tensors = {name: held.get(name, tensor) for name, tensor in learned.tensors.items()}
    return Learned(state=replace(learned, tensors=tensors), epochs=epochs)
