"""The costs of tasks, as the simulator reads them: one array for each quantity, shape (tasks,), in the graph's order.

For example, a forward of 2 s and an upload of 10 bytes over a link of 5 bytes/s with a latency of 0.04 s::

    seconds  [2, 0.04]    body_bytes  [0, 10]    link_bytes_s  [inf, 5]    alone_s  [2, 2.04]
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from funcpipe.errors import InvalidValue
from funcpipe.scheduler.graph import Graph
from funcpipe.scheduler.tasks import Task

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a task: first `seconds`, then `payload_bytes` at no more than `link_bytes_s`.

    Without a link, moving the bytes is part of the seconds. Transfers through the same `store`, by number, share what
    it moves.
    """

    seconds: float
    payload_bytes: float = 0
    link_bytes_s: float | None = None
    store: int = 0

    def __post_init__(self) -> None:
        if not self.seconds >= 0:
            raise InvalidValue("seconds", self.seconds, "must be at least 0")
        if self.link_bytes_s is not None and not self.link_bytes_s > 0:
            raise InvalidValue("link_bytes_s", self.link_bytes_s, "must be more than 0")


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of all tasks: first `seconds`, then `body_bytes` at no more than `link_bytes_s` (infinite without one).

    `payload_bytes` is what an event reports, also where moving the bytes is part of the seconds.
    """

    seconds: Array
    body_bytes: Array
    link_bytes_s: Array
    payload_bytes: npt.NDArray[np.int64]
    stores: npt.NDArray[np.int64]

    @property
    def alone_s(self) -> Array:
        """The time of each task when nothing disturbs it."""
        return self.seconds + self.body_bytes / self.link_bytes_s


def costs_of(graph: Graph, cost: Callable[[Task], Cost], *, uniform: bool = False) -> Costs:
    """Ask `cost` for every task; with `uniform`, once for all tasks that differ only in micro-batch and replica."""
    if not uniform:
        return _columns([cost(task) for task in graph.tasks])
    places: dict[tuple[object, ...], int] = {}
    sorts = [places.setdefault((task[0], task[1], *task[4:]), len(places)) for task in graph.tasks]
    examples = dict(zip(reversed(sorts), reversed(graph.tasks), strict=True))
    table = _columns([cost(examples[place]) for place in range(len(places))])
    order = np.array(sorts, dtype=np.int64)
    return Costs(
        seconds=table.seconds[order],
        body_bytes=table.body_bytes[order],
        link_bytes_s=table.link_bytes_s[order],
        payload_bytes=table.payload_bytes[order],
        stores=table.stores[order],
    )


def _columns(costs: list[Cost]) -> Costs:
    return Costs(
        seconds=np.array([cost.seconds for cost in costs], dtype=np.float64),
        body_bytes=np.array([cost.payload_bytes if cost.link_bytes_s else 0 for cost in costs], dtype=np.float64),
        link_bytes_s=np.array([cost.link_bytes_s or np.inf for cost in costs], dtype=np.float64),
        payload_bytes=np.array([round(cost.payload_bytes) for cost in costs], dtype=np.int64),
        stores=np.array([cost.store for cost in costs], dtype=np.int64),
    )
