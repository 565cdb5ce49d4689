"""Spot machines that are taken back: their workers get no more work, and a new plan adds what is missing.

A `Replanner` watches a run. On a notice the survivors go on at once; spotDNN's model says what to rent beside them so
that the deadline is still met, and those workers join when they are ready. A type of machine of which one was taken
back is not asked for again. If nothing makes the deadline, the survivors go on alone.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from funcpipe.core.provision import Provision
from funcpipe.errors import Infeasible
from funcpipe.neighbours.parameter_server.values import ServerWorker
from funcpipe.neighbours.parameter_server.worker_group import WorkerGroup
from funcpipe.neighbours.provisioning.goal import Goal
from funcpipe.neighbours.provisioning.spotdnn import SpotSystem, SpotType, replan

_log = logging.getLogger(__name__)

Notices = Callable[[], Sequence[str]]
"""The names of workers whose machines are about to be taken back, each reported once or more often."""

Rent = Callable[[Sequence[ServerWorker]], None]
"""A function that orders the machines of these workers; they start when their nodes have joined Ray."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Revocation:
    """A revocation at `time_s` of the run, when the share `done` of it was done.

    `plan` is what the survivors and those that `joined` make together; None if nothing meets the deadline.
    """

    time_s: float
    done: float
    left: tuple[str, ...]
    joined: tuple[str, ...]
    plan: Provision | None


@dataclass(frozen=True, kw_only=True)
class SpotPlan:
    """The parts of a new plan: the job's goal, with its deadline in seconds, and spotDNN's view of the market.

    Machines that join take `overhead_s`.
    """

    goal: Goal
    types: tuple[SpotType, ...]
    system: SpotSystem
    overhead_s: float = 30.0

    def beside(
        self, survivors: Sequence[ServerWorker], gone: Sequence[str], *, done: float, elapsed_s: float
    ) -> tuple[Provision, tuple[tuple[SpotType, int], ...]]:
        """The new plan, and how many more of each type it rents; `gone` are types to be had no more.

        Raises Infeasible.
        """
        counts = tuple(sum(worker.machine == kind.name for worker in survivors) for kind in self.types)
        types = tuple(
            replace(kind, quota=count if kind.name in gone else max(kind.quota, count))
            for kind, count in zip(self.types, counts, strict=True)
        )
        remaining_s = max(self.goal.deadline_s - elapsed_s, 1e-9)
        plan = replan(
            self.goal, types, self.system, counts, done=done, remaining_s=remaining_s, overhead_s=self.overhead_s
        )
        rented = {item.name: item.count for item in plan.rented if item.role == "worker"}
        more = ((kind, rented.get(kind.name, 0) - n) for kind, n in zip(types, counts, strict=True))
        return plan, tuple((kind, count) for kind, count in more if count > 0)


class Replanner:
    """A watch for runs on spot machines; `revocations` records what it has seen and done."""

    def __init__(
        self,
        plan: SpotPlan,
        notices: Notices,
        rent: Rent,
        *,
        like: Callable[[SpotType, str], ServerWorker],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`like` makes the worker of a type of machine, under a name. The deadline counts from now on."""
        self._plan, self._notices, self._rent, self._like, self._clock = plan, notices, rent, like, clock
        self._began_s = clock()
        self._known: dict[str, ServerWorker] = {}
        self._starting: set[str] = set()
        self._gone: set[str] = set()
        self.revocations: list[Revocation] = []

    def __call__(self, group: WorkerGroup, done: float) -> None:
        """Handle machines that leave, or have left without notice."""
        present = {worker.name: worker for worker in group.workers}
        self._starting -= present.keys()
        vanished = self._known.keys() - present.keys() - self._starting
        self._known |= present
        noticed = {name for name in self._notices() if name in present}
        leaving = sorted(vanished | noticed)
        if not leaving:
            return
        for name in sorted(noticed):
            group.leave(name)
        left = [self._known.pop(name) for name in leaving]
        self._gone |= {worker.machine for worker in left}
        self._add(group, done, left)

    def _add(self, group: WorkerGroup, done: float, left: Sequence[ServerWorker]) -> None:
        elapsed_s = self._clock() - self._began_s
        survivors = tuple(self._known.values())
        plan: Provision | None = None
        joining: list[ServerWorker] = []
        try:
            plan, more = self._plan.beside(survivors, sorted(self._gone), done=min(done, 0.999), elapsed_s=elapsed_s)
        except Infeasible as error:
            _log.warning("no machine is added: %s", error)
        else:
            number = len(self.revocations) + 1
            joining = [self._like(kind, f"{kind.name}-r{number}.{i}") for kind, count in more for i in range(count)]
        if joining:
            self._rent(joining)
        for worker in joining:
            self._known[worker.name] = worker
            self._starting.add(worker.name)
            group.join(worker)
        names = tuple(worker.name for worker in left), tuple(worker.name for worker in joining)
        _log.warning("%s left; %s joins", ", ".join(names[0]), ", ".join(names[1]) or "no worker")
        self.revocations.append(Revocation(time_s=elapsed_s, done=done, left=names[0], joined=names[1], plan=plan))
