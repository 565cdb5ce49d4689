"""Runs one batch in eval mode: the worker's forwards and messages, on their lanes."""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from funcpipe.comm.channel import Channel
from funcpipe.core import CountsByKind, WorkerSpec, worker_name
from funcpipe.model.split import StageModule
from funcpipe.platforms.base import Storage
from funcpipe.runstate.validation_reports import ValidationKeys
from funcpipe.scheduler.execute import TaskResult, execute
from funcpipe.scheduler.graph import Graph, forward_graph
from funcpipe.scheduler.tasks import Kind, Task, source_of
from funcpipe.training.batches import Step
from funcpipe.training.evaluation import Evaluation, Scores, StageEvaluation
from funcpipe.training.passes import Batch
from funcpipe.worker.lane_monitor import LaneMonitor
from funcpipe.worker.step_graph import message_counts

OPEN_TRANSFERS = 4
"""The number of uploads, and of downloads, that may be open at once."""


class BatchRunner:
    """Runs a batch in eval mode for a worker; `trained` is its stage in training."""

    def __init__(
        self,
        spec: WorkerSpec,
        evaluation: StageEvaluation,
        storage: Storage,
        channel: Channel,
        *,
        trained: StageModule,
        lanes: LaneMonitor,
        threads: ThreadPoolExecutor,
        cancel: threading.Event,
        record: Callable[[CountsByKind, CountsByKind], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Call `record` with this worker's, and all others', storage requests for messages."""
        self._spec = spec
        self._keys = ValidationKeys.of(spec)
        self._storage = storage
        self._channel = channel
        self._lanes = lanes
        self._threads = threads
        self._cancel = cancel
        self._record = record
        self._clock = clock
        self._routes = evaluation.routes
        self._names = {(r.producer, part): r.tensors for part, r in evaluation.routes.numbered_activations()}
        self._made: dict[int, tuple[Graph, CountsByKind, CountsByKind]] = {}
        self.scores = Scores(evaluation.loss, evaluation.metrics)
        is_last = spec.stage == len(spec.plan.stages) - 1
        self._evaluation = Evaluation(
            evaluation.stage,
            scores=self.scores if is_last else None,
            seed=spec.seed,
            keep_outputs=evaluation.keep_outputs,
        )
        self.trained = trained

    def adopt(self, prefix: str) -> None:
        """Leave the messages below `prefix` as they are: earlier attempts have put them."""
        self._channel.adopt(frozenset(self._storage.list(prefix)) if self._spec.attempt else ())

    def run(self, step: int, batch: Step, load: Callable[[int], Batch]) -> Evaluation:
        """Run `batch` of the validation after `step` steps; `load` loads a micro-batch. Raises what `execute` does."""
        graph, own, others = self._graph(len(batch.micro_batches))
        self._channel.begin_step()
        self._evaluation.begin(batch, load)
        actions: Mapping[Kind, Callable[[Task], TaskResult]] = {
            Kind.FORWARD: self._forward,
            Kind.PUT_ACTIVATION: lambda task: self._put(step, batch.number, task),
            Kind.GET_ACTIVATION: lambda task: self._get(step, batch.number, task),
        }
        execute(
            graph,
            self._lanes.watched(lambda task: actions[task.kind](task)),
            step=step,
            cancel=self._cancel,
            threads=self._threads,
            open_requests=OPEN_TRANSFERS,
            clock=self._clock,
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
        assert task.micro_batch is not None
        assert task.part is not None
        tensors: dict[str, Tensor] = self._evaluation.take_activations(
            task.micro_batch, self._names[task.stage, task.part]
        )
        return TaskResult(self._channel.put(self._key(step, batch, task), tensors, wire=self._spec.plan.wire))

    def _get(self, step: int, batch: int, task: Task) -> TaskResult:
        assert task.micro_batch is not None
        received = self._channel.get(self._key(step, batch, source_of(task)))
        self._evaluation.receive_activation(task.micro_batch, received.tensors)
        return TaskResult(received.payload_bytes, received.waited_s)

    def _key(self, step: int, batch: int, put: Task) -> str:
        return self._keys.batch_message(worker_name(put.stage, put.replica), step, batch, str(put))

    def _graph(self, micro_batches: int) -> tuple[Graph, CountsByKind, CountsByKind]:
        if micro_batches not in self._made:
            plan, spec = self._spec.plan, self._spec
            graph = forward_graph(
                stages=len(plan.stages), replicas=plan.replicas, micro_batches=micro_batches, routes=self._routes
            )
            mine = graph.of_worker(spec.stage, spec.replica)
            others = [task for task in graph.tasks if (task.stage, task.replica) != (spec.stage, spec.replica)]
            self._made[micro_batches] = (mine, message_counts(mine.tasks), message_counts(others))
        return self._made[micro_batches]
