"""Which messages a worker may delete: those that every reader has certainly read.

A worker that has heard from a reader in a later step, or from one that heard from it, knows that the reader has
finished every step before.
"""

from collections.abc import Mapping

from funcpipe.scheduler.graph import Graph
from funcpipe.scheduler.tasks import Task

Worker = tuple[int, int]


class Retention:
    """The messages that one worker has written and not deleted yet."""

    def __init__(self) -> None:
        self._kept: list[tuple[str, frozenset[Worker]]] = []

    def after_step(self, written: Mapping[str, frozenset[Worker]], heard: frozenset[Worker]) -> list[str]:
        """Note what was written in a step, by key with its readers; return the older keys that may go.

        `heard` are the workers whose work in that step something was read of.
        """
        free = [key for key, readers in self._kept if readers <= heard]
        self._kept = [(key, readers) for key, readers in self._kept if not readers <= heard]
        self._kept += written.items()
        return free


def readers_of(graph: Graph, worker: Worker) -> dict[Task, frozenset[Worker]]:
    """For each put of `worker` the workers that read its object."""
    return {
        put: frozenset((get.stage, get.replica) for get in gets)
        for put, gets in graph.readers().items()
        if (put.stage, put.replica) == worker
    }


def heard_by(graph: Graph, worker: Worker) -> frozenset[Worker]:
    """The workers that `worker` reads something from, or that did a task which had to come before."""
    seen = [(task.stage, task.replica) == worker for task in graph.tasks]
    stack = [position for position, own in enumerate(seen) if own]
    found = set()
    while stack:
        for need in graph.needs[stack.pop()]:
            if not seen[need]:
                seen[need] = True
                stack.append(need)
                found.add((graph.tasks[need].stage, graph.tasks[need].replica))
    return frozenset(found)
