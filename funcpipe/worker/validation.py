"""A worker's part in a validation: its stage's forwards over the data, batch by batch, and what all of them found.

A validation after k steps comes between step k - 1 and step k, and after the checkpoint of k steps. So an attempt that
restarts from that checkpoint begins with the validation again, unless its report is there: that is written once, and
every worker reads it before it goes on. In the middle of a validation, an attempt goes on with the first batch that its
replica of the last stage has not measured.

    s0   batch 0 | batch 1 | batch 2 …            reads the report | step k
    s1      batch 0, part 0 | batch 1, part 1 … → all parts → report | step k
"""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping

from torch import Tensor

from funcpipe.comm.channel import Channel
from funcpipe.core import CountsByKind, Outcome, ValidationReport, worker_name
from funcpipe.core.backoff import Backoff
from funcpipe.core.validation import LOSS, is_due, next_report
from funcpipe.errors import Cancelled, DeadlineExceeded, KeyMissing
from funcpipe.model.split import StageModule
from funcpipe.platforms.base import Storage
from funcpipe.runstate.checkpoints import Checkpoints
from funcpipe.runstate.documents import get_document
from funcpipe.runstate.reports import ValidationKeys, find_report, load_reports, put_report
from funcpipe.runstate.validations import BestModel, get_part, put_part
from funcpipe.scheduler.execute import TaskResult, execute
from funcpipe.scheduler.graph import Graph, forward_graph
from funcpipe.scheduler.tasks import Kind, Task, open_requests, source_of
from funcpipe.training.batches import Step
from funcpipe.training.evaluation import Evaluation, Scores, StageEvaluation, evaluating
from funcpipe.training.loading import Loader
from funcpipe.training.metrics import Part
from funcpipe.training.passes import Batch
from funcpipe.training.state import StageState
from funcpipe.worker.message_copies import MessageCopies
from funcpipe.worker.step_graph import message_counts
from funcpipe.worker.step_runner import StepRunner


class _BatchRunner:
    """Runs a batch in eval mode for a worker, on the lanes on which `steps` runs its steps of training."""

    def __init__(
        self,
        evaluation: StageEvaluation,
        storage: Storage,
        channel: Channel,
        steps: StepRunner,
        record: Callable[[CountsByKind, CountsByKind], None],
    ) -> None:
        """Call `record` with this worker's, and all others', storage requests for messages."""
        spec = self._spec = steps.spec
        self._keys = ValidationKeys.of(spec)
        self._storage = storage
        self._channel = channel
        self._steps = steps
        self._record = record
        self._routes = evaluation.routes
        self._names = {(r.producer, part): r.tensors for part, r in evaluation.routes.numbered_activations()}
        self._made: dict[int, tuple[Graph, CountsByKind, CountsByKind]] = {}
        self.scores = Scores(evaluation.loss, evaluation.metrics, steps.computation.device)
        is_last = spec.stage == len(spec.plan.stages) - 1
        self._evaluation = Evaluation(
            evaluation.stage,
            scores=self.scores if is_last else None,
            seed=spec.seed,
            keep_outputs=evaluation.keep_outputs,
            device=steps.computation.device,
        )
        self._messages = MessageCopies(steps.computation.device, take=self._take, receive=self._receive)

    def adopt(self, prefix: str) -> None:
        """Leave the messages below `prefix` as they are: earlier attempts have put them."""
        self._channel.adopt(frozenset(self._storage.list(prefix)) if self._spec.attempt else ())

    def run(self, step: int, batch: Step, load: Callable[[int], Batch]) -> Evaluation:
        """Run `batch` of the validation after `step` steps; `load` loads a micro-batch. Raises what `execute` does."""
        graph, own, others = self._graph(len(batch.micro_batches))
        self._channel.begin_step()
        self._messages.begin()
        self._evaluation.begin(batch, load)
        actions: Mapping[Kind, Callable[[Task], TaskResult]] = {
            Kind.FORWARD: self._forward,
            Kind.PUT_ACTIVATION: lambda task: self._put(step, batch.number, task),
            Kind.GET_ACTIVATION: lambda task: self._get(step, batch.number, task),
            Kind.ACTIVATION_TO_HOST: self._messages.to_host,
            Kind.ACTIVATION_TO_DEVICE: self._messages.to_device,
        }
        execute(
            graph,
            self._steps.lanes.watched(lambda task: actions[task.kind](task)),
            step=step,
            cancel=self._steps.cancel,
            threads=self._steps.threads,
            open_requests=open_requests(replicas=1),
            clock=self._steps.clock,
        )
        self._record(own, others)
        return self._evaluation

    def delete(self, step: int, batch: Step) -> None:
        """Delete the messages of `batch`, which is measured."""
        graph, _, _ = self._graph(len(batch.micro_batches))
        puts = [task for task in graph.tasks if task.kind.is_put]
        self._storage.delete_many([self._key(step, batch.number, put) for put in puts])

    def _forward(self, task: Task) -> TaskResult:
        assert task.micro_batch is not None
        self._evaluation.forward(task.micro_batch)
        return TaskResult()

    def _put(self, step: int, batch: int, task: Task) -> TaskResult:
        tensors, wire = self._messages.sent(task), self._spec.plan.wire
        return TaskResult(self._channel.put(self._key(step, batch, task), tensors, wire=wire))

    def _take(self, task: Task) -> dict[str, Tensor]:
        assert task.micro_batch is not None
        assert task.part is not None
        return self._evaluation.take_activations(task.micro_batch, self._names[task.stage, task.part])

    def _get(self, step: int, batch: int, task: Task) -> TaskResult:
        received = self._channel.get(self._key(step, batch, source_of(task)))
        self._messages.got(task, received.tensors)
        return TaskResult(received.payload_bytes, received.waited_s)

    def _receive(self, task: Task, tensors: Mapping[str, Tensor]) -> None:
        assert task.micro_batch is not None
        self._evaluation.receive_activation(task.micro_batch, tensors)

    def _key(self, step: int, batch: int, put: Task) -> str:
        return self._keys.batch_message(worker_name(put.stage, put.replica), step, batch, str(put))

    def _graph(self, micro_batches: int) -> tuple[Graph, CountsByKind, CountsByKind]:
        if micro_batches not in self._made:
            plan, spec = self._spec.plan, self._spec
            graph = forward_graph(
                stages=len(plan.stages),
                replicas=plan.replicas,
                micro_batches=micro_batches,
                routes=self._routes,
                accelerated=spec.accelerated,
            )
            mine = graph.of_worker(spec.stage, spec.replica)
            others = [task for task in graph.tasks if (task.stage, task.replica) != (spec.stage, spec.replica)]
            self._made[micro_batches] = (mine, message_counts(mine.tasks), message_counts(others))
        return self._made[micro_batches]


_log = logging.getLogger(__name__)

BATCHES_AHEAD = 8
"""The batches that a stage may be ahead of the last stage's measurements: their messages lie in the storage."""

_PAUSES = Backoff(first_s=0.02, most_s=1.0)

Leave = Callable[[float, float], Outcome | None]
"""Called between batches with the seconds of a batch and of all that are left: how the worker must end now, if so."""


class _Left(Exception):
    """The worker must end in the middle of a validation."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.value)
        self.outcome = outcome


class Validator:
    """The validations of one worker, whose steps `steps` runs, with its stage in training, `trained`.

    `open_loader` gives what loads its micro-batches, if its stage reads data. `record` is called as by a _BatchRunner.
    """

    def __init__(
        self,
        evaluation: StageEvaluation,
        storage: Storage,
        channel: Channel,
        steps: StepRunner,
        *,
        trained: StageModule,
        open_loader: Callable[[], Loader | None],
        record: Callable[[CountsByKind, CountsByKind], None],
    ) -> None:
        spec = self._spec = steps.spec
        self._evaluation = evaluation
        self._storage = storage
        self._keys = ValidationKeys.of(spec)
        self._steps = steps
        self._runner = _BatchRunner(evaluation, storage, channel, steps, record)
        self._trained = trained
        self._open_loader = open_loader
        self._last = len(spec.plan.stages) - 1
        self._parts: dict[str, Part] = {}
        self._batches = evaluation.batches(spec.plan).epoch(0)
        self._batch_s = 0.0
        self.took_s = 0.0

    def is_due(self, step: int) -> bool:
        """Return True if the run is to be validated after `step` steps, and no earlier generation has done that."""
        known = self._spec.validated
        due = is_due(step, every=self._evaluation.every, began_step=self._spec.began_step)
        return due and (known is None or known.step < step)

    def run(self, step: int, leave: Leave) -> ValidationReport | Outcome:
        """Validate after `step` steps, or find out what others have; how the worker must end, if it must before.

        Raises DeadlineExceeded if the validation makes no progress for `message_deadline_s`.
        """
        began_s = time.monotonic()
        report = find_report(self._storage, self._keys, step)
        if report is None:
            try:
                report = self._validate(step, leave)
            except _Left as left:
                return left.outcome
            self.took_s = time.monotonic() - began_s
        self._delete_messages()
        _log.info("validated after step %d: %s", step, dict(report.values))
        return report

    def keep_best(self, report: ValidationReport, state: Callable[[], StageState]) -> None:
        """Keep the stage's `state` if the validation of `report` is among the best; what no longer is goes.

        A model stays as long as the run may be resumed at a step at which it is among the best.
        """
        if self._spec.replica or report.step not in report.best_steps:
            return
        best = BestModel(self._storage, self._keys)
        writer = f"{self._spec.worker}.a{self._spec.attempt:08d}"
        best.save(self._spec.stage, report.step, state(), writer=writer)
        plan = self._spec.plan
        index = Checkpoints(self._storage, self._keys, first_step=self._spec.first_step).index()
        until = index.common_step(len(plan.stages), plan.replicas)
        known = [] if self._spec.validated is None else [self._spec.validated]
        reports = [*known, *load_reports(self._storage, self._keys)]
        first = max((one.step for one in reports if one.step < until), default=0)
        best.delete_others(
            self._spec.stage, {step for one in reports if one.step >= first for step in one.best_steps} | {report.step}
        )

    def _validate(self, step: int, leave: Leave) -> ValidationReport:
        spec, own = self._spec, worker_name(self._last, self._spec.replica)
        prefix = self._keys.parts(step, own)
        first = len(self._storage.list(prefix))
        self._runner.adopt(self._keys.batch_messages(spec.worker))
        _log.info("validates after step %d, from batch %d of %d", step, first, len(self._batches))
        loader = self._open_loader()
        with evaluating(self._evaluation, self._trained), loader or contextlib.nullcontext():
            for batch in self._batches[first:]:
                self._raise_if_ended(leave, self._batch_s, self._batch_s * (len(self._batches) - batch.number))
                began_s = time.monotonic()
                if spec.stage != self._last and batch.number >= BATCHES_AHEAD:
                    measured = self._batches[batch.number - BATCHES_AHEAD]
                    self._await(step, self._keys.part(step, own, measured.number), spec.replica, leave)
                    self._runner.delete(step, measured)
                self._run_batch(step, batch, loader)
                self._batch_s = max(self._batch_s, time.monotonic() - began_s)
        if spec.stage == self._last and not spec.replica:
            return self._report(step, leave)
        self._await(step, self._keys.report(step), 0, leave)
        return get_document(self._storage, ValidationReport, self._keys.report(step))

    def _run_batch(self, step: int, batch: Step, loader: Loader | None) -> None:
        def load(micro_batch: int) -> Batch:
            assert loader is not None, "only stages that read data or measure load data"
            loader.load(batch.number, micro_batch)
            return loader.take(batch.number, micro_batch)

        evaluation = self._runner.run(step, batch, load)
        if self._spec.stage != self._last:
            return
        assert evaluation.scores is not None, "the last stage measures"
        key = self._keys.part(step, self._spec.worker, batch.number)
        if evaluation.outputs:  # before the part, which says that the batch is done
            put_part(self._storage, self._keys.output(self._spec.replica, batch.number), evaluation.outputs)
        self._parts[key] = evaluation.scores.part()
        put_part(self._storage, key, self._parts[key])

    def _report(self, step: int, leave: Leave) -> ValidationReport:
        """Combine the parts of all replicas, in the order of batches and replicas, and write the report."""
        replicas = range(self._spec.plan.replicas)
        for replica in replicas[1:]:
            newest = self._keys.part(step, worker_name(self._last, replica), len(self._batches) - 1)
            self._await(step, newest, replica, leave)
        keys = [
            self._keys.part(step, worker_name(self._last, replica), batch.number)
            for batch in self._batches
            for replica in replicas
        ]
        parts = [self._parts[key] if key in self._parts else get_part(self._storage, key) for key in keys]
        self._parts = {}
        samples, values = self._runner.scores.values(parts, loss=LOSS)
        report = next_report(self._evaluation.monitor, self._before(step), step=step, samples=samples, values=values)
        report = put_report(self._storage, self._keys, report)
        own = self._keys.prefix_of_parts(step)
        outdated = [key for key in self._storage.list(self._keys.all_parts) if key < own]
        if outdated:
            self._storage.delete_many(outdated)
        return report

    def _before(self, step: int) -> ValidationReport | None:
        """Return the report of the validation before this one, which an earlier generation may have made."""
        before, known = self._evaluation.previous(step), self._spec.validated
        earlier = before <= self._spec.began_step or before < self._spec.first_step
        if earlier or (known is not None and known.step == before):
            return known
        return get_document(self._storage, ValidationReport, self._keys.report(before))

    def _await(self, step: int, key: str, replica: int, leave: Leave) -> None:
        """Wait for what `replica` of the last stage is to write under `key`."""
        get = Task(Kind.GET_SCORES, self._spec.stage, replica, peer=self._last)

        def wait(task: Task) -> TaskResult:
            self._wait(step, key, leave)
            return TaskResult()

        self._steps.lanes.watched(wait)(get)

    def _wait(self, step: int, key: str, leave: Leave) -> None:
        seen, tries, deadline_s = -1, 0, self._spec.message_deadline_s
        until_s = time.monotonic() + deadline_s
        while True:
            with contextlib.suppress(KeyMissing):
                self._storage.get(key)
                return
            self._raise_if_ended(leave, self._batch_s, 0.0)
            if time.monotonic() > until_s:
                parts = len(self._storage.list(self._keys.prefix_of_parts(step)))
                if parts == seen:
                    raise DeadlineExceeded(f"{key} has not come, and no batch was measured within {deadline_s:g} s")
                seen, until_s = parts, time.monotonic() + deadline_s
            tries += 1
            self._storage.wait(key, 1.0 if self._storage.watches else _PAUSES.pause_s(tries), self._steps.cancel)
            if self._steps.cancel.is_set():
                raise Cancelled(f"stopped waiting for {key}")

    def _raise_if_ended(self, leave: Leave, batch_s: float, left_s: float) -> None:
        if self._steps.cancel.is_set():
            raise Cancelled("stopped from outside")
        outcome = leave(batch_s, left_s)
        if outcome is not None:
            raise _Left(outcome)

    def _delete_messages(self) -> None:
        """Delete what is left of this worker's messages: every batch is measured."""
        if self._spec.stage != self._last:
            left = self._storage.list(self._keys.batch_messages(self._spec.worker))
            if left:
                self._storage.delete_many(left)
