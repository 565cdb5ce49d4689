"""The messages that a worker may delete: those that will not be read again.

A message has certainly been read once its writer has finished a later step in which it depended on every reader,
directly or through others. A reader that dies may read it again, until the checkpoint that it would restart from covers
the message: a checkpoint after k steps covers what was written in steps 0 … k - 1. So may the writer itself, which
repeats steps with what it has written.
"""

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from funcpipe.core import WorkerId
from funcpipe.scheduler.graph import Graph
from funcpipe.scheduler.tasks import Task


@dataclass(frozen=True)
class StepMessages:
    """The messages that a worker puts in a step: the `readers` of each key.

    `upstream` are the workers that the writer's own tasks of the step depend on. No worker puts more than `most`
    messages in the step.
    """

    readers: Mapping[str, frozenset[WorkerId]]
    upstream: frozenset[WorkerId]
    most: int = 0


@dataclass(frozen=True)
class _Message:
    step: int
    key: str
    readers: frozenset[WorkerId]


class MessageGC:
    """The messages that `writer`, or an earlier attempt of it, has put and not deleted yet."""

    def __init__(self, writer: WorkerId) -> None:
        self._writer = writer
        self._unread: list[_Message] = []
        self._read: list[_Message] = []
        self._lock = threading.Lock()  # messages are collected in the background while the next step ends

    def add_step(self, step: int, messages: StepMessages) -> None:
        """Record that the worker has finished `step`."""
        with self._lock:
            self._read += [message for message in self._unread if message.readers <= messages.upstream]
            self._unread = [message for message in self._unread if not message.readers <= messages.upstream]
            self._unread += [_Message(step, key, readers) for key, readers in messages.readers.items()]

    def keeps_before(self, step: int) -> bool:
        """Return True if messages of steps before `step` are still to be deleted."""
        with self._lock:
            return any(message.step < step for message in self._read)

    def collect(self, restart_step: Callable[[WorkerId], int]) -> list[str]:
        """Return the keys to delete, by the step at which each worker would restart; they are not returned again."""
        with self._lock:
            kept = [
                m for m in self._read if any(restart_step(reader) <= m.step for reader in m.readers | {self._writer})
            ]
            keys = {message.key for message in self._read} - {message.key for message in kept}
            self._read = kept
        return sorted(keys)


def most_objects(graph: Graph) -> int:
    """Return the largest number of objects that a worker of `graph` puts."""
    return max(Counter((put.stage, put.replica) for put in graph.readers()).values(), default=0)


def readers_of(graph: Graph, worker: WorkerId) -> dict[Task, frozenset[WorkerId]]:
    """Return the workers that read the object of each put of `worker`."""
    return {
        put: frozenset((get.stage, get.replica) for get in gets)
        for put, gets in graph.readers().items()
        if (put.stage, put.replica) == worker
    }


def upstream_of(graph: Graph, worker: WorkerId) -> frozenset[WorkerId]:
    """Return the workers with a task that must come before some task of `worker`."""
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
