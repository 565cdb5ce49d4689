"""Plays a graph whose tasks do not slow each other down for all workers at a time, as arrays.

What a worker does until the next object of another one can reach it depends on that worker alone. So time goes on in
*windows* as long as the shortest request: in a window, each lane takes one task after the other, and the n-th of all
lanes is one operation on arrays. Downloads come first, whose ends may let an upload begin in the same window; then
uploads. Computations need no turn: what they need says when they start and end. Whatever is sure to end is *settled*,
which may be ahead of the window, and gives those that wait for it their time.

This bets that no lane learns too late of a task that it would have taken before another, and that no order depends on
which of two events of one moment comes first. All of that is checked: where it cannot be told, `sweep` returns None,
and the graph has to be played event by event.

For example, two workers put for 2 s and 3 s, then each gets for 2 s what the other has put; windows are 2 s long::

    0 s … 2 s    both puts are taken; they end at 2 s and 3 s, so the gets may start at 3 s and 2 s
    2 s … 4 s    both gets are taken; they end at 5 s and 4 s
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from funcpipe.core import Resource
from funcpipe.scheduler.simulator.compiled_graph import LANES, Array, GraphArrays
from funcpipe.scheduler.simulator.costs import Array as Seconds
from funcpipe.scheduler.simulator.costs import Costs, LostAttempt
from funcpipe.scheduler.simulator.disturbances import Failure
from funcpipe.scheduler.simulator.folded_graph import LEAST_LATENCY_S

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Swept:
    """Starts and ends of all tasks, -1 for those that never happen; deaths of their workers, and what those undid."""

    starts_s: Seconds
    ends_s: Seconds
    attempts: list[int]
    lost: tuple[LostAttempt, ...]


def sweep(graph: GraphArrays, costs: Costs, starting_s: Seconds, failures: Sequence[Failure]) -> Swept | None:
    """Play `graph`, whose workers start after `starting_s`; None where the order of events cannot be told.

    Without `failures` as `IndependentSimulator` does, to the bit, otherwise as `SharedSimulator`.
    """
    try:
        return _Sweep(graph, costs, starting_s, failures).play()
    except _UncertainError:
        return None


class _UncertainError(Exception):
    """Two events may come in either order."""


def _refuse(doubtful: Flags) -> None:
    if doubtful.any():
        raise _UncertainError


class _Sweep:
    """One play. Entries are numbered as in `compiled_graph`; arrays have one element for each, and one for no task."""

    def __init__(self, graph: GraphArrays, costs: Costs, starting_s: Seconds, failures: Sequence[Failure]) -> None:
        entries = len(graph.waits)
        self.graph = graph
        self.started_s = starting_s.copy()
        self.failures = sorted(failures, key=attrgetter("at_s"))
        self.in_parts = bool(failures)
        self.side = np.append(graph.side_by_side, False)
        side, none = self.side[: graph.tasks], np.zeros(entries + 1 - graph.tasks)
        seconds, body_s = costs.seconds, costs.body_bytes / costs.link_bytes_s
        if not self.in_parts:
            seconds = np.where(side, seconds, costs.alone_s)
            body_s = np.where(side, costs.alone_s - costs.seconds, 0.0)
        self.latency_s = np.append(np.where(side, seconds, 0.0), none)
        self.whole_s = np.append(np.where(side, 0.0, seconds), none)  # with the body, what has the lane
        self.body_s = np.append(body_s, none)
        self.worker_of = np.append(graph.worker_of, -1)
        self.waits, self.ready_s = graph.waits.copy(), np.zeros(entries)
        self.last_need = np.full(entries + 1, -1)  # the last event that releases an entry, at `ready_s`
        self.starts_s, self.ends_s, self.delivered_s = (np.full(entries + 1, -1.0) for _ in range(3))
        self.deaths = np.zeros(len(graph.workers), np.int64)
        self.dies_s = np.full(len(graph.workers), np.inf)
        for failure in reversed(self.failures):
            self.dies_s[graph.workers[failure.worker]] = failure.at_s
        self.lost: list[LostAttempt] = []
        self.lanes = _Downloads(self, Resource.DOWNLOAD), _Uploads(self, Resource.UPLOAD)
        shared = np.flatnonzero(graph.lane >= 0)
        request_s = np.where(self.side[shared], self.latency_s[shared], self.whole_s[shared] + self.body_s[shared])
        self.window_s = float(request_s.min(initial=np.inf))
        _refuse((request_s < LEAST_LATENCY_S) | (self.whole_s[shared] + self.body_s[shared] <= 0))

    def play(self) -> Swept:
        """Play to the end."""
        count = self.graph.tasks
        self.settle(count + np.arange(len(self.started_s)), self.started_s)
        while True:
            now_s = min(lanes.next_s() for lanes in self.lanes)
            dies_s = self.failures[0].at_s if self.failures else np.inf
            if self.failures and now_s >= dies_s:
                self._die(self.failures.pop(0))
                continue
            if now_s == np.inf:
                attempts = self.deaths[self.graph.worker_of[:count]].tolist()
                return Swept(self.starts_s[:count], self.ends_s[:count], attempts, tuple(self.lost))
            for lanes in self.lanes:
                tasks, ends_s = lanes.advance(min(now_s + self.window_s, dies_s))
                self.settle(tasks, ends_s)

    def settle(self, entries: Array, ends_s: Seconds) -> None:
        """Let `entries` end, unless their workers die before, and what waits for them alone start."""
        graph, released = self.graph, [entries[:0]]
        while len(entries):
            alive = ends_s <= self.dies_s[self.worker_of[entries]]
            entries, ends_s = entries[alive], ends_s[alive]
            first, counts = graph.first[entries], graph.first[entries + 1] - graph.first[entries]
            edges = np.arange(counts.sum()) + np.repeat(first - (np.cumsum(counts) - counts), counts)
            later, when_s, sources = graph.released[edges], np.repeat(ends_s, counts), np.repeat(entries, counts)
            if self.in_parts:  # an object that is put again is news to nobody else
                new = (self.delivered_s[sources] < 0) | (self.worker_of[sources] == self.worker_of[later])
                later, when_s, sources = later[new], when_s[new], sources[new]
                again = self.delivered_s[entries] >= 0
                self.delivered_s[entries[~again]] = ends_s[~again]
            self.ends_s[entries] = ends_s
            self._tell(sources, later, when_s)
            later = np.unique(later[self.waits[later] == 0])
            strict = graph.lane[later] < 0
            if len(released) > 1:  # those of a start come in order, but not behind what takes no time then
                _refuse(~strict & (self.ready_s[later] == self.started_s[self.worker_of[later]]))
            released.append(later[~strict])
            entries = later[strict]
            self.starts_s[entries] = self.ready_s[entries]
            ends_s = self.ready_s[entries] + self.whole_s[entries] + self.body_s[entries]
        tasks = np.concatenate(released)
        for lanes in self.lanes:
            lanes.release(tasks[lanes.row[tasks] >= 0])

    def _tell(self, sources: Array, later: Array, when_s: Seconds) -> None:
        """Let entries `later` wait for the ends of `sources` no more."""
        np.subtract.at(self.waits, later, 1)
        before_s = self.ready_s[later]
        np.maximum.at(self.ready_s, later, when_s)
        ready_s = self.ready_s[later]
        self.last_need[later[ready_s > before_s]] = -1
        last = when_s == ready_s
        joins = self.graph.tasks + len(self.started_s)
        ends = np.where(sources < joins, sources, self.last_need[sources])
        np.maximum.at(self.last_need, later[last], ends[last])

    def _die(self, failure: Failure) -> None:
        """Undo what a worker has done, except for objects that others may have read; if it is done, leave it alone."""
        graph, worker, at_s = self.graph, self.graph.workers[failure.worker], failure.at_s
        own = np.flatnonzero(graph.worker_of == worker)
        again = [later.at_s for later in self.failures if later.worker == failure.worker]
        self.dies_s[worker] = min(again, default=np.inf)
        if (self.ends_s[own] >= 0).all():
            return
        begun = own[(own < graph.tasks) & (self.starts_s[own] >= 0) & (self.starts_s[own] <= at_s)]
        ends_s = np.where(self.ends_s[begun] >= 0, self.ends_s[begun], at_s)
        attempt = int(self.deaths[worker])
        for task, start_s, end_s in zip(*(x.tolist() for x in (begun, self.starts_s[begun], ends_s)), strict=True):
            self.lost.append(LostAttempt(task, start_s, end_s, attempt))
        self.starts_s[own] = self.ends_s[own] = -1.0
        edges = np.flatnonzero(self.worker_of[graph.released] == worker)
        sources, targets = np.searchsorted(graph.first, edges, side="right") - 1, graph.released[edges]
        there = (self.delivered_s[sources] >= 0) & (graph.worker_of[sources] != worker)
        self.waits[own], self.ready_s[own], self.last_need[own] = graph.waits[own], 0.0, -1
        self._tell(sources[there], targets[there], self.delivered_s[sources[there]])
        for lanes in self.lanes:
            lanes.clear(np.unique(lanes.row[own]), at_s)
        self.deaths[worker] += 1
        self.started_s[worker] = at_s + failure.restart_s
        self.settle(np.array([graph.tasks + worker]), self.started_s[[worker]])


class _Lanes:
    """The lanes of one resource: rows. `tasks` has those of each lane in order, its last column none.

    A slot is an open request: its column in `tasks`, and when it comes to its lane, which may not be known yet.
    """

    def __init__(self, play: _Sweep, resource: Resource) -> None:
        graph, self.play = play.graph, play
        on = np.flatnonzero((graph.lane >= 0) & (graph.lane % len(LANES) == LANES.index(resource)))
        on = on[np.argsort(graph.lane[on], kind="stable")]
        found, begins, self.counts = np.unique(graph.lane[on], return_index=True, return_counts=True)
        self.row, self.column = (np.full(len(graph.waits) + 1, -1) for _ in range(2))
        self.row[on] = np.repeat(np.arange(len(found)), self.counts)
        self.column[on] = np.arange(len(on)) - np.repeat(begins, self.counts)
        self.none = int(self.counts.max(initial=0))
        self.tasks = np.full((len(found), self.none + 1), len(graph.waits))
        self.tasks[self.row[on], self.column[on]] = on
        self.ready_s = np.full(self.tasks.shape, np.inf)
        slots = len(found), graph.open_requests[resource]
        self.open, self.comes_s = np.full(slots, self.none), np.full(slots, np.inf)
        self.free_s, self.last_s = (np.full(len(found), -np.inf) for _ in range(2))

    def clear(self, rows: Array, at_s: float) -> None:
        """Forget what the lanes `rows` have done, whose worker dies."""
        rows = rows[rows >= 0]
        _refuse(self.next_of(rows) == at_s)
        self.ready_s[rows] = self.comes_s[rows] = np.inf
        self.free_s[rows] = self.last_s[rows] = -np.inf
        self.open[rows] = self.none

    def next_s(self) -> float:
        """Return when the next of all lanes has something to do."""
        return float(self.next_of(np.arange(len(self.tasks))).min(initial=np.inf))

    def next_of(self, rows: Array) -> Seconds:
        """Return when each of the lanes `rows` has something to do."""
        times: Seconds = np.maximum(self.free_s[rows], self.comes_s[rows].min(axis=1))
        return times

    def ask(self, rows: Array, slots: Array, tasks: Array, asked_s: Seconds, ended: Flags) -> None:
        """Open requests in `slots`; where a request has `ended` on the lane at that moment, it is asked for first."""
        side = self.play.side[tasks]
        self.play.starts_s[tasks[side]] = asked_s[side]
        comes_s = asked_s + self.play.latency_s[tasks]
        _refuse(~side & ended & (asked_s == self.play.ready_s[tasks]))
        comes_s = np.where(ended & ~side, np.nextafter(comes_s, -np.inf), comes_s)
        _refuse(comes_s <= self.last_s[rows])
        self.comes_s[rows, slots] = comes_s

    def serve(self, rows: Array, start_s: Seconds) -> tuple[Array, Array, Seconds]:
        """Let each lane take a request at `start_s`: the first in the graph's order of those that have come before it
        is free, or else that which comes first. Returns their slots, tasks and ends.
        """
        comes_s, open_, free_s = self.comes_s[rows], self.open[rows], self.free_s[rows]
        earliest_s = comes_s.min(axis=1)
        busy = earliest_s < free_s
        tied = comes_s == start_s[:, None]
        doubtful = np.flatnonzero(tied.sum(axis=1) > ~busy)
        if len(doubtful):
            self._tell_apart(self.tasks[rows[doubtful, None], open_[doubtful]], tied[doubtful], busy[doubtful])
        latest_s = np.maximum(earliest_s, np.nextafter(free_s, -np.inf))
        slots = np.where(comes_s <= latest_s[:, None], open_, self.none + 1).argmin(axis=1)
        tasks = self.tasks[rows, open_[np.arange(len(rows)), slots]]
        whole = ~self.play.side[tasks]
        self.play.starts_s[tasks[whole]] = start_s[whole]
        ends_s = start_s + self.play.whole_s[tasks] + self.play.body_s[tasks]
        self.free_s[rows], self.last_s[rows] = ends_s, start_s
        return slots, tasks, ends_s

    def _tell_apart(self, tasks: Array, tied: Flags, busy: Flags) -> None:
        """Of the tasks of each lane that are `tied`, make sure that the first in the graph's order comes first, and all
        of them once it is free if it is `busy`.
        """
        whole = tied & ~self.play.side[tasks]
        _refuse((whole | (tied & self.play.in_parts)) & busy[:, None])
        _refuse(whole.any(axis=1) & (whole != tied).any(axis=1))
        needs = np.where(whole, self.play.last_need[tasks], len(self.play.waits))
        first = np.where(whole, tasks, len(self.play.waits)).argmin(axis=1)
        _refuse(whole & (needs < needs[np.arange(len(needs)), first][:, None]))


class _Downloads(_Lanes):
    """Lanes on which requests are opened in order: the first ones at once, each other one at an end (`gates_s`)."""

    def __init__(self, play: _Sweep, resource: Resource) -> None:
        super().__init__(play, resource)
        self.gates_s = np.empty_like(self.comes_s)
        self.opened = np.empty_like(self.counts)
        self._open_first(np.arange(len(self.tasks)))

    def _open_first(self, rows: Array) -> None:
        slots = self.open.shape[1]
        self.open[rows] = np.where(np.arange(slots) < self.counts[rows, None], np.arange(slots), self.none)
        self.gates_s[rows], self.opened[rows] = -np.inf, slots

    def clear(self, rows: Array, at_s: float) -> None:
        super().clear(rows, at_s)
        self._open_first(rows[rows >= 0])

    def release(self, tasks: Array) -> None:
        """Nothing else keeps `tasks` from being asked for but their turn."""
        rows, columns = self.row[tasks], self.column[tasks]
        self.ready_s[rows, columns] = self.play.ready_s[tasks]
        now = columns < self.opened[rows]
        rows, columns = rows[now], columns[now]
        self._ask(rows, (self.open[rows] == columns[:, None]).argmax(axis=1))

    def _ask(self, rows: Array, slots: Array) -> None:
        columns, gates_s = self.open[rows, slots], self.gates_s[rows, slots]
        ready_s = self.ready_s[rows, columns]
        self.ask(rows, slots, self.tasks[rows, columns], np.maximum(gates_s, ready_s), gates_s >= ready_s)

    def advance(self, until_s: float) -> tuple[Array, Seconds]:
        """Take all requests that can be taken before `until_s`; returns them and their ends."""
        done, ends = [self.counts[:0]], [self.free_s[:0]]
        rows, start_s = np.arange(len(self.tasks)), self.next_of(np.arange(len(self.tasks)))
        while (now := start_s < until_s).any():
            rows = rows[now]
            slots, tasks, ends_s = self.serve(rows, start_s[now])
            done.append(tasks)
            ends.append(ends_s)
            columns = np.where(self.opened[rows] < self.counts[rows], self.opened[rows], self.none)
            self.opened[rows] += 1
            self.open[rows, slots], self.comes_s[rows, slots], self.gates_s[rows, slots] = columns, np.inf, ends_s
            ready = self.ready_s[rows, columns] < np.inf
            self._ask(rows[ready], slots[ready])
            start_s = self.next_of(rows)
        return np.concatenate(done), np.concatenate(ends)


class _Uploads(_Lanes):
    """Lanes on which those that may start overtake those that may not; a slot is vacant since `vacant_s`."""

    def __init__(self, play: _Sweep, resource: Resource) -> None:
        super().__init__(play, resource)
        self.vacant_s = np.full_like(self.comes_s, -np.inf)
        self.asked_s, self.soonest_s = np.full_like(self.free_s, -np.inf), np.full_like(self.free_s, np.inf)

    def clear(self, rows: Array, at_s: float) -> None:
        super().clear(rows, at_s)
        rows = rows[rows >= 0]
        self.vacant_s[rows], self.asked_s[rows], self.soonest_s[rows] = -np.inf, -np.inf, np.inf

    def next_of(self, rows: Array) -> Seconds:
        return np.minimum(super().next_of(rows), self._next_asked(rows))

    def _next_asked(self, rows: Array) -> Seconds:
        times: Seconds = np.maximum(self.vacant_s[rows].min(axis=1), self.soonest_s[rows])
        return times

    def release(self, tasks: Array) -> None:
        """Nothing else keeps `tasks` from being asked for but room."""
        rows, ready_s = self.row[tasks], self.play.ready_s[tasks]
        _refuse(ready_s <= self.asked_s[rows])
        order = np.lexsort((tasks, ready_s, rows))
        tasks, rows, ready_s = tasks[order], rows[order], ready_s[order]
        tied = (np.diff(rows, prepend=-1) == 0) & (np.diff(ready_s, prepend=-1) == 0)
        _refuse(tied & (np.diff(self.play.last_need[tasks], prepend=-1) < 0))
        _refuse(self.ready_s[rows[~tied]] == ready_s[~tied, None])
        self.ready_s[rows, self.column[tasks]] = ready_s
        np.minimum.at(self.soonest_s, rows, ready_s)

    def advance(self, until_s: float) -> tuple[Array, Seconds]:
        """Take all requests that can be taken before `until_s`; returns them and their ends."""
        done, ends = [self.counts[:0]], [self.free_s[:0]]
        rows = np.arange(len(self.tasks))
        while len(rows):
            asked_s, start_s = self._next_asked(rows), super().next_of(rows)
            now = np.minimum(asked_s, start_s) < until_s
            rows, asked_s, start_s = rows[now], asked_s[now], start_s[now]
            asks = asked_s <= start_s
            self._open(rows[asks], asked_s[asks])
            slots, tasks, ends_s = self.serve(rows[~asks], start_s[~asks])
            self.comes_s[rows[~asks], slots], self.vacant_s[rows[~asks], slots] = np.inf, ends_s
            done.append(tasks)
            ends.append(ends_s)
        return np.concatenate(done), np.concatenate(ends)

    def _open(self, rows: Array, asked_s: Seconds) -> None:
        """Ask for the first in the graph's order of those that wait for room, or else for that which comes first."""
        ready_s, vacant_s = self.ready_s[rows], self.vacant_s[rows].min(axis=1)
        late = self.soonest_s[rows] <= vacant_s
        _refuse(ready_s[late] == vacant_s[late, None])
        latest_s = np.maximum(self.soonest_s[rows], np.nextafter(vacant_s, -np.inf))
        columns, slots = (ready_s <= latest_s[:, None]).argmax(axis=1), self.vacant_s[rows].argmin(axis=1)
        self.open[rows, slots], self.vacant_s[rows, slots] = columns, np.inf
        ready_s[np.arange(len(rows)), columns] = self.ready_s[rows, columns] = np.inf
        self.soonest_s[rows], self.asked_s[rows] = ready_s.min(axis=1), asked_s
        self.ask(rows, slots, self.tasks[rows, columns], asked_s, asked_s == vacant_s)
