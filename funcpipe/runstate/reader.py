"""A run as its storage has it: what status, watch, follow, resume, export and results know, they ask here.

A reader is a view of one moment: each part is read when it is first asked for, and once. For what has changed since,
make another. What a run has cost is in its heartbeats and reports.
"""

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from funcpipe.core import (
    CountsByKind,
    Event,
    Events,
    FinishedRun,
    Heartbeat,
    PlatformSpec,
    RunAccount,
    RunRecord,
    Stores,
    ValidationReport,
    WorkerId,
    WorkerReport,
    worker_name,
)
from funcpipe.core.cached import cached_property
from funcpipe.errors import RunUnknown
from funcpipe.platforms.base import Storage
from funcpipe.runstate.checkpoint_index import CheckpointIndex, read_index
from funcpipe.runstate.documents import readable_documents, side_by_side
from funcpipe.runstate.finished import ended_step, find_finished
from funcpipe.runstate.functions import list_functions
from funcpipe.runstate.generations import newest_record
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.liveness import attempt_of, read_heartbeats
from funcpipe.runstate.reports import JoinedStep, ValidationKeys, load_reported, load_reports, newest_report

_log = logging.getLogger(__name__)


def worker_reports(storage: Storage, keys: Keys) -> tuple[WorkerReport, ...]:
    """Return the reports of all functions that could make one before they ended."""
    return tuple(readable_documents(storage, WorkerReport, storage.list(keys.worker_reports)))


def spent_so_far(storage: Storage, record: RunRecord, known: Collection[Heartbeat] | None = None) -> RunAccount:
    """Return the cost and time of the run: the most that any of its documents says, reports without hours of stores.

    Of its heartbeats those that are `known`, or else all, are asked; each tells of the whole run.
    Requests of the newest generation are apart, by the estimate of its functions; earlier ones are in its record.
    """
    if known is None:
        known = [beat for beat in read_heartbeats(storage, record) if beat is not None]
    usd, seconds = [record.spent_usd], [record.elapsed_s]
    usd += [beat.run_usd for beat in known]
    seconds += [beat.run_s for beat in known]
    if not known:
        reports = worker_reports(storage, Keys.of(record))
        usd.append(record.spent_usd + sum(report.alive_s * report.usd_s for report in reports))
        seconds.append(record.elapsed_s + max((report.alive_s for report in reports), default=0.0))
        _log.warning(
            "run %s: no heartbeat can be read; its account goes on from what %d reports tell: $%.6f, %.1f s",
            *(record.run, len(reports), max(usd), max(seconds)),
        )
    requests_usd = max([beat.run_requests_usd for beat in known], default=0.0)
    return RunAccount(spent_usd=max(usd), elapsed_s=max(seconds), requests_usd=requests_usd)


def spent_with_requests(storage: Storage, record: RunRecord, prices: PlatformSpec) -> RunAccount:
    """Return the cost and time of a run that has ended, with the requests that its functions have reported."""
    keys, spent = Keys.of(record), spent_so_far(storage, record)
    functions = len(list_functions(storage, keys))
    requests = reported_requests(storage, keys, worker_reports(storage, keys))
    requests_usd = request_usd(requests, prices, record.plan.stores, functions=functions)
    return replace(spent, spent_usd=spent.spent_usd + requests_usd, requests_usd=0.0)


def reported_requests(storage: Storage, keys: Keys, reports: Sequence[WorkerReport]) -> CountsByKind:
    """The requests of all attempts: as in `reports`, or by its last heartbeat of one that could make no report."""
    reported = {(report.worker, report.attempt) for report in reports}
    beats = [key for key in storage.list(keys.all_heartbeats) if attempt_of(keys, key) not in reported]
    unreported = (beat.counts for beat in readable_documents(storage, Heartbeat, beats))
    return sum([*(report.counts for report in reports), *unreported], CountsByKind())


def request_usd(requests: CountsByKind, prices: PlatformSpec, stores: Stores, *, functions: int) -> float:
    """Return dollars for storage requests and their bytes, and for the invocations of so many functions."""
    return prices.counted_usd(requests, stores) + functions * prices.price_invocation_usd


if TYPE_CHECKING:
    from funcpipe.runstate.base import StoredBase
    from funcpipe.training.state import StageState


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The mean loss of each step from where the run has begun, the numbers of those that updated nothing, and the
    learning rates of the newest generation's steps, as far as they were reported.
    """

    losses: tuple[float, ...] = ()
    skipped_steps: tuple[int, ...] = ()
    learning_rates: Mapping[int, float] = field(default_factory=dict)


class RunReader:
    """Reads the generation of a run that `record` describes from `storage`, which is signed."""

    def __init__(self, storage: Storage, record: RunRecord) -> None:
        self.storage = storage
        self.record = record
        self.keys = Keys.of(record)

    @classmethod
    def newest(cls, storage: Storage, run: str) -> "RunReader":
        """Return a reader of the newest generation of `run` that counts. Raises RunUnknown, or CorruptMessage."""
        return cls(storage, newest_record(storage, run))

    @cached_property
    def finished(self) -> FinishedRun | None:
        """The kept part of a run that has finished and was collected, or None. Raises CorruptMessage."""
        return find_finished(self.storage, self.keys)

    @cached_property
    def steps(self) -> dict[int, JoinedStep]:
        """The steps of this generation that any replica of the last stage has reported, in order."""
        last, replicas = len(self.record.plan.stages) - 1, self.record.plan.replicas
        names = [worker_name(last, replica) for replica in range(replicas)]
        own = side_by_side(lambda name: load_reported(self.storage, self.keys, name).reports, names)
        numbers = sorted(set().union(*own))
        return {step: JoinedStep.of([reports[step] for reports in own if step in reports]) for step in numbers}

    @cached_property
    def losses(self) -> tuple[float, ...]:
        """The mean loss of each step that all replicas have reported, from where the run has begun."""
        if self.finished is not None:
            return self.finished.losses
        losses, step, replicas = list(self.record.losses), self.record.first_step, self.record.plan.replicas
        while step in self.steps and self.steps[step].replicas == replicas:
            losses.append(self.steps[step].loss)
            step += 1
        return tuple(losses)

    def history(self, step: int) -> History:
        """Return what the first `step` steps have left: of a loss that only some replicas have left, the mean of
        theirs; NaN of one that can be read nowhere.
        """
        if self.finished is not None:
            return History(losses=self.finished.losses, skipped_steps=self.finished.skipped_steps)
        record = self.record
        losses = list(record.losses[: step - record.began_step])
        skipped = [number for number in record.skipped_steps if number < step]
        for number in range(record.began_step + len(losses), step):
            joined = self.steps.get(number) or JoinedStep.of(())
            if joined.replicas < record.plan.replicas:
                _log.warning("run %s: the loss of step %d is that of %d replicas", record.run, number, joined.replicas)
            losses.append(joined.loss)
            skipped += [number] if joined.skipped else []
        rates = {n: own.learning_rate for n, own in self.steps.items() if own.learning_rate is not None}
        return History(losses=tuple(losses), skipped_steps=tuple(skipped), learning_rates=rates)

    @property
    def ended_step(self) -> int | None:
        """The steps after which the run has finished; None if it has not."""
        return None if self.finished is None else ended_step(self.record, self.finished.losses)

    @cached_property
    def validations(self) -> tuple[ValidationReport, ...]:
        """The reports of this generation's validations, in the order of their steps."""
        return load_reports(self.storage, ValidationKeys.of(self.record))

    @cached_property
    def newest_validation(self) -> ValidationReport | None:
        """The newest report of the run's validations, if there is one that can be read."""
        newest = newest_report(self.storage, ValidationKeys.of(self.record))
        return newest or next(reversed(self.record.validations), None)

    @cached_property
    def workers(self) -> tuple[WorkerReport, ...]:
        """The reports of all functions that could make one before they ended."""
        return worker_reports(self.storage, self.keys)

    @cached_property
    def index(self) -> CheckpointIndex:
        """The index of checkpoints."""
        return read_index(self.storage, self.keys, first_step=self.record.first_step)

    @cached_property
    def base(self) -> "StoredBase":
        """The tensors that the run does not change. Raises RunUnknown or CorruptMessage if that cannot be read."""
        from funcpipe.runstate.base import load_base

        return load_base(self.storage, self.record)

    @cached_property
    def saved(self) -> dict[int, list[tuple[str, ...]]]:
        """The steps after which all stages are saved, the newest first, with the manifests of each stage."""
        stages = range(len(self.record.plan.stages))
        steps = self.index.common_steps(len(stages))
        found = {step: [self.index.manifests(stage, step) for stage in stages] for step in steps}
        return {step: manifests for step, manifests in found.items() if all(manifests)}

    def model(self, step: int, *, opened: bool = False) -> "StageState":
        """Return the whole model after `step` steps, with the optimiser of the first replica if each has its own.

        If it is only `opened`, its tensors are read when they are asked for; those of replicas that train alone are
        read at once. Raises RunUnknown if it was not saved; CorruptMessage, and so does each reading.
        """
        if step not in self.saved:
            raise RunUnknown(f"run {self.keys.run} has left no checkpoint after its last step, {step}")
        if self.record.plan.trains_locally:
            return self.models_of_replicas(step, 1)[0]
        return self._joined(self.saved[step], opened=opened)

    def models_of_replicas(self, step: int, replicas: int) -> "tuple[StageState, ...]":
        """Return the whole model after `step` steps as each of the first `replicas` has it. Raises as `model`."""
        stages = range(len(self.record.plan.stages))
        return tuple(
            self._joined([self._manifests_of((stage, replica), step) for stage in stages])
            for replica in range(replicas)
        )

    def _manifests_of(self, worker: WorkerId, step: int) -> tuple[str, ...]:
        """Return the manifests with all that `worker` has: its own first, and those of others that keep parts of it."""
        others = self.index.manifests(worker[0], step) if self.record.plan.is_sharded else ()
        return tuple(dict.fromkeys((*self.index.manifests_for(worker, step), *others)))

    def _joined(self, manifests: Sequence[tuple[str, ...]], *, opened: bool = False) -> "StageState":
        """Return the whole model of the checkpoints that have these manifests, for each stage."""
        from funcpipe.runstate.checkpoints import Checkpoints
        from funcpipe.training.sharding import unshard
        from funcpipe.training.state import merge_stages

        checkpoints = Checkpoints(self.storage, self.keys)
        held = 0 if opened else math.inf
        parts = (checkpoints.load_combined(stage, own, held_bytes=held) for stage, own in enumerate(manifests))
        return merge_stages([unshard(part) for part in parts])

    def best_models(self, validations: Sequence[ValidationReport], *, opened: bool = False) -> "dict[int, StageState]":
        """Return the models of the best of these `validations` by their steps, as far as all of their stages are kept.

        The best one comes first.
        """
        from funcpipe.runstate.validations import BestModel
        from funcpipe.training.state import merge_stages

        kept, models = BestModel(self.storage, ValidationKeys.of(self.record)), {}
        for step in validations[-1].best_steps if validations else ():
            states = [kept.load(stage, step, opened=opened) for stage in range(len(self.record.plan.stages))]
            found = [state for state in states if state is not None]
            if len(found) == len(states):
                models[step] = merge_stages(found)
        return models

    def events(self) -> tuple[list[Event], dict[int, int]]:
        """Return the events of the last steps, by their functions' clocks, and the samples of each step.

        Of a step that was done again, the last attempt's count.
        """
        newest: dict[tuple[int, int, int], tuple[int, list[Event]]] = {}
        samples: dict[int, int] = {}
        for document in readable_documents(self.storage, Events, self.storage.list(self.keys.traces)):
            samples |= document.samples
            for event in document.events:
                place = (event.stage, event.replica, event.step)
                attempt, events = newest.setdefault(place, (event.attempt, []))
                if event.attempt > attempt:
                    newest[place] = (event.attempt, [event])
                elif event.attempt == attempt:
                    events.append(event)
        return [event for _, events in newest.values() for event in events], dict(sorted(samples.items()))
