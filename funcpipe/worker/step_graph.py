"""A worker's part of a step: its tasks, and who reads what it writes."""

from collections.abc import Mapping
from dataclasses import dataclass

from funcpipe.core import Routes, WorkerSpec
from funcpipe.scheduler.graph import Graph, StepShape, build_graph
from funcpipe.scheduler.tasks import Task
from funcpipe.worker.message_gc import Worker, heard_by, readers_of


@dataclass(frozen=True)
class WorkOrder:
    """A worker's part of a step's graph; who reads each object that it writes; whom it hears from."""

    graph: Graph
    readers: Mapping[Task, frozenset[Worker]]
    heard: frozenset[Worker]


def work_order(spec: WorkerSpec, routes: Routes, *, norms: bool, micro_batches: int) -> WorkOrder:
    """What the worker of `spec` does in a step of so many micro-batches."""
    plan, worker = spec.plan, (spec.stage, spec.replica)
    graph = build_graph(
        StepShape(
            stages=len(plan.stages),
            replicas=plan.replicas,
            micro_batches=micro_batches,
            routes=routes,
            schedule=plan.schedule,
            sync=plan.sync,
            norms=norms,
            streams=plan.streams,
        )
    )
    return WorkOrder(graph.of_worker(*worker), readers_of(graph, worker), heard_by(graph, worker))
