"""Simulates the transfers of a synchronisation on separate links, for comparison with the closed forms.

Each replica has an uplink and a downlink. In each direction some requests are open at once: of puts the first that may
begin, of gets the next in the order of the lane, which waits for its object. Then a request waits for its latency, then
for the link, on which one body moves at a time. Adding takes no time.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from funcpipe.comm.collectives import transfers
from funcpipe.comm.sum_pattern import Move, Pattern, Transfer


@dataclass(frozen=True)
class Links:
    """Bytes per second each way, latency of a request, and how many puts and gets are open."""

    up: float
    down: float
    latency_s: float
    open_uploads: int = 1000
    open_downloads: int = 1000


@dataclass(frozen=True)
class Moved:
    """When a transfer of a replica was asked for, and when its body moved."""

    replica: int
    transfer: Transfer
    asked_s: float
    began_s: float
    ended_s: float


def play(pattern: Pattern, gradient_bytes: float, links: Links, *, merged_bytes: float | None = None) -> list[Moved]:
    """All transfers of all replicas, in the order in which they ended. Sums take `merged_bytes` where that differs."""
    return _Play(pattern, gradient_bytes, gradient_bytes if merged_bytes is None else merged_bytes, links).run()


def duration_s(pattern: Pattern, gradient_bytes: float, links: Links, *, merged_bytes: float | None = None) -> float:
    return max(moved.ended_s for moved in play(pattern, gradient_bytes, links, merged_bytes=merged_bytes))


class _Play:
    def __init__(self, pattern: Pattern, gradient_bytes: float, merged_bytes: float, links: Links) -> None:
        self.pattern, self.links = pattern, links
        self.raw_bytes, self.merged_bytes = gradient_bytes, merged_bytes
        self.moves = [transfers(pattern, replica) for replica in range(pattern.replicas)]
        self.ended: dict[tuple[int, int], float] = {}
        self.readable: set[tuple[Move, int, int]] = set()
        self.queues = {(r, up): self._lane(r, up) for r in range(pattern.replicas) for up in (True, False)}
        self.active: dict[tuple[int, bool], list[int]] = {lane: [] for lane in self.queues}
        self.waiting: dict[tuple[int, bool], list[tuple[float, int]]] = {lane: [] for lane in self.queues}
        self.asked: dict[tuple[int, int], float] = {}
        self.busy: set[tuple[int, bool]] = set()
        self.events: list[tuple[float, int, Callable[[float], Sequence[int]]]] = []
        self.count = 0
        self.log: list[Moved] = []
        self.readers: dict[tuple[Move, int, int], list[int]] = defaultdict(list)
        for replica, moves in enumerate(self.moves):
            for transfer in moves:
                if transfer.peer is not None:
                    self.readers[self._object_of(transfer)].append(replica)

    def run(self) -> list[Moved]:
        for replica in range(len(self.moves)):
            self._advance(replica, 0.0)
        while self.events:
            now_s, _, action = heapq.heappop(self.events)
            for replica in action(now_s):
                self._advance(replica, now_s)
        assert len(self.ended) == sum(map(len, self.moves)), "the replicas wait for each other"
        return self.log

    def _lane(self, replica: int, up: bool) -> list[int]:
        kinds = (Move.PUT_SPLIT, Move.PUT_MERGED) if up else (Move.GET_SPLIT, Move.GET_MERGED)
        return [i for i, transfer in enumerate(self.moves[replica]) if transfer.move in kinds]

    def _advance(self, replica: int, now_s: float) -> None:
        for i, transfer in enumerate(self.moves[replica]):
            merged = transfer.move is Move.MERGE and (replica, i) not in self.ended
            if merged and all((replica, j) in self.ended for j in transfer.after):
                self.ended[replica, i] = now_s
        for lane in ((replica, True), (replica, False)):
            queue = self.queues[lane]
            for i in list(queue):
                if len(self.active[lane]) == (self.links.open_uploads if lane[1] else self.links.open_downloads):
                    break
                if lane[1] and not self._can_begin(lane[0], i):
                    continue
                queue.remove(i)
                self.active[lane].append(i)
            for i in self.active[lane]:
                if (lane[0], i) not in self.asked and self._can_begin(lane[0], i):
                    self._ask(lane, i, now_s)

    def _can_begin(self, replica: int, i: int) -> bool:
        transfer = self.moves[replica][i]
        if not all((replica, j) in self.ended for j in transfer.after):
            return False
        return transfer.peer is None or self._object_of(transfer) in self.readable

    def _object_of(self, get: Transfer) -> tuple[Move, int, int]:
        assert get.peer is not None
        return Move.PUT_SPLIT if get.move is Move.GET_SPLIT else Move.PUT_MERGED, get.peer, get.part

    def _ask(self, lane: tuple[int, bool], i: int, now_s: float) -> None:
        self.asked[lane[0], i] = now_s
        self._at(now_s + self.links.latency_s, lambda at_s: self._arrive(lane, i, at_s))

    def _arrive(self, lane: tuple[int, bool], i: int, now_s: float) -> Sequence[int]:
        heapq.heappush(self.waiting[lane], (now_s, i))
        self._next_body(lane, now_s)
        return ()

    def _next_body(self, lane: tuple[int, bool], now_s: float) -> None:
        if lane in self.busy or not self.waiting[lane]:
            return
        _, i = heapq.heappop(self.waiting[lane])
        self.busy.add(lane)
        size = self._bytes(lane[0], self.moves[lane[0]][i])
        ends_s = now_s + size / (self.links.up if lane[1] else self.links.down)
        self._at(ends_s, lambda at_s: self._end(lane, i, now_s, at_s))

    def _end(self, lane: tuple[int, bool], i: int, began_s: float, now_s: float) -> Sequence[int]:
        """The replicas for which this makes a difference."""
        replica, transfer = lane[0], self.moves[lane[0]][i]
        self.busy.remove(lane)
        self.active[lane].remove(i)
        self.ended[replica, i] = now_s
        if lane[1]:
            self.readable.add((transfer.move, replica, transfer.part))
        self.log.append(Moved(replica, transfer, self.asked[replica, i], began_s, now_s))
        self._next_body(lane, now_s)
        readers = self.readers[transfer.move, replica, transfer.part] if lane[1] else []
        return sorted({replica, *readers})

    def _bytes(self, replica: int, transfer: Transfer) -> float:
        match transfer.move:
            case Move.PUT_SPLIT:
                return self.pattern.raw_share(replica, transfer.part) * self.raw_bytes
            case Move.GET_SPLIT:
                return self.pattern.read_share(transfer.part) * self.raw_bytes
            case _:
                return self.pattern.merged_share(transfer.part) * self.merged_bytes

    def _at(self, when_s: float, action: Callable[[float], Sequence[int]]) -> None:
        self.count += 1
        heapq.heappush(self.events, (when_s, self.count, action))
