"""Which messages a worker may delete: those that nobody will read again.

A message was read once its writer has heard, in a later step, from every reader or from one that heard from it. It may
be read again by a reader that dies, until the checkpoint that it would start from covers it: one after k steps covers
what was written in the steps before k.
"""

from collections.abc import Callable, Mapping

from funcpipe.scheduler.graph import Graph
from funcpipe.scheduler.tasks import Task

Worker = tuple[int, int]


class MessageGC:
    """The messages that one worker, or an earlier attempt of it, has written and not deleted yet."""

    def __init__(self) -> None:
        self._unheard: list[tuple[int, str, frozenset[Worker]]] = []
        self._read: list[tuple[int, str, frozenset[Worker]]] = []

    def after_step(self, step: int, written: Mapping[str, frozenset[Worker]], heard: frozenset[Worker]) -> None:
        """Note what was written in `step`, by key with its readers; in it something was read of the work of `heard`."""
        self._read += [entry for entry in self._unheard if entry[2] <= heard]
        self._unheard = [entry for entry in self._unheard if not entry[2] <= heard]
        self._unheard += [(step, key, readers) for key, readers in written.items()]

    def covered(self, restart: Callable[[Worker], int]) -> list[str]:
        """The keys that may go, now that each worker would start again at a certain step; they are forgotten."""
        kept = [entry for entry in self._read if any(restart(reader) <= entry[0] for reader in entry[2])]
        free = {key for _, key, _ in self._read} - {key for _, key, _ in kept}
        self._read = kept
        return sorted(free)


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
