"""What tasks take, as the simulator reads it: one array for each quantity, along the tasks of a graph."""

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
    """What a task takes: seconds of its lane whatever else goes on, then bytes at no more than `link_bytes_s`.

    Where no link is given, the bytes are part of the seconds.
    """

    seconds: float
    payload_bytes: float = 0
    link_bytes_s: float | None = None

    def __post_init__(self) -> None:
        if not self.seconds >= 0:
            raise InvalidValue("seconds", self.seconds, "must be at least 0")
        if self.link_bytes_s is not None and not self.link_bytes_s > 0:
            raise InvalidValue("link_bytes_s", self.link_bytes_s, "must be more than 0")


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of all tasks of a graph, in its order: `seconds`, then `body_bytes` at no more than `link_bytes_s`."""

    seconds: Array
    body_bytes: Array
    link_bytes_s: Array
    payload_bytes: npt.NDArray[np.int64]

    @property
    def alone_s(self) -> Array:
        """What each task takes when it has its function and its link to itself."""
        return self.seconds + self.body_bytes / self.link_bytes_s


def costs_of(graph: Graph, cost: Callable[[Task], Cost], *, alike: bool = False) -> Costs:
    """Ask `cost` for every task; with `alike`, once for all that differ in micro-batch and replica only."""
    if not alike:
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
    )


def _columns(costs: list[Cost]) -> Costs:
    return Costs(
        seconds=np.array([cost.seconds for cost in costs], dtype=np.float64),
        body_bytes=np.array([cost.payload_bytes if cost.link_bytes_s else 0 for cost in costs], dtype=np.float64),
        link_bytes_s=np.array([cost.link_bytes_s or np.inf for cost in costs], dtype=np.float64),
        payload_bytes=np.array([round(cost.payload_bytes) for cost in costs], dtype=np.int64),
    )
