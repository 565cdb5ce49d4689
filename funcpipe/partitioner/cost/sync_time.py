"""How long replicas need to sum their gradients through storage: a closed form for each way of doing it.

n replicas sum s bytes each; up and down are the bytes per second of their links. Every request has a latency before its
body moves, an object can be read once its put has ended, as many requests are open at once as functions open, and in
each direction one body moves at a time. No algorithm is faster than two latencies and max(s / up, 2 s (n-1) / (n
down)): every element must go up at least once from each replica, and come down as n-1 others' values or sums of them.

By hand: four replicas with 120 bytes each, 10 bytes/s up, 30 bytes/s down, no latency. A split of 30 bytes takes 3 s up
and 1 s down. Three-phase: three splits up (9 s), three down (3 s), the sum up (3 s), three sums down (3 s): 18 s.

>>> link = {"gradient_bytes": 120, "replicas": 4, "upload_bytes_s": 10, "download_bytes_s": 30, "latency_s": 0}
>>> float(sync_time_s(Sync.THREE_PHASE, **link))
18.0

Where a store is polled, who waits for an object asks for it every `poll_s` seconds, so finds it late (`found_late_s`).

Where the store takes so many requests a second, a function's requests follow each other at a `Pace`: then k objects
take at least k times that, as if they were larger. By hand: with 4 s between two puts, the three splits go up in 12 s.

The tests compare every form with a simulation of the single transfers. `sync_choice` finds the best way for one
gradient on one kind of function; the ways of all stages at once are in `sync_ways`.
"""

from functools import lru_cache

import numpy as np

from funcpipe.core import Streams, Sync, usual_streams
from funcpipe.core.choices import OPEN_UPLOADS, members_of_group, open_downloads, tree_depth
from funcpipe.core.texts import STAGE_PREFIXES
from funcpipe.partitioner.cost import Array
from funcpipe.partitioner.cost.rounding import Rounding, all_s, unhidden_s
from funcpipe.partitioner.cost.stores import UNPACED, Pace
from funcpipe.partitioner.cost.waits import Cut, found_late_s, idle_s, waves_of


def sync_time_s(
    sync: Sync,
    *,
    gradient_bytes: Array | float,
    replicas: int,
    upload_bytes_s: Array | float,
    download_bytes_s: Array | float,
    latency_s: float,
    poll_s: float = 0.0,
    streams: Streams | None = None,
    backward_s: Array | float = 0.0,
    merged_bytes: Array | float | None = None,
    rounding: Rounding | None = None,
    pace: Pace = UNPACED,
) -> Array:
    """Seconds in which `replicas` functions sum `gradient_bytes` each, counted from the end of their last backward.

    Bytes are those that travel. Where the sums, or what is sent in their place, are as many values in another format,
    they take `merged_bytes`. Exchange, streamed and tree begin during that backward, which takes `backward_s`.
    `rounding` is what the processor takes besides.

    Three-phase (LambdaML): the splits of others up, one's own split from each of them down, the merged split up and
    those of the others down, one after the other. Pipelined (FuncPipe): the first two overlap, step by step. For equal
    links w the two take 3s/w − 2s/(nw) + 4 latencies and 2s/w + (2 + n) latencies (FuncPipe, section 3.3).
    """
    split_bytes = np.asarray(gradient_bytes, dtype=np.float64) / replicas
    up_s, down_s = split_bytes / upload_bytes_s, split_bytes / download_bytes_s
    if replicas == 1:
        return np.zeros_like(up_s)
    merged_bytes = np.asarray(gradient_bytes if merged_bytes is None else merged_bytes, dtype=np.float64)
    others = replicas - 1
    merged_up_s, merged_down_s = (merged_bytes / replicas / link for link in (upload_bytes_s, download_bytes_s))
    late_s = found_late_s(poll_s, replicas, others * down_s)
    both_late_s = late_s + found_late_s(poll_s, replicas, others * merged_down_s)
    spread_s: Array = merged_bytes / replicas * (1 / upload_bytes_s + others / download_bytes_s)
    spread_s = spread_s + pace.waits_s(merged_up_s, 1, others * merged_down_s, others)
    link = (gradient_bytes, replicas, upload_bytes_s, download_bytes_s)
    if sync in (Sync.EXCHANGE, Sync.STREAMED, Sync.TREE):
        return exposed_s(
            sync,
            *link,
            latency_s,
            usual_streams(sync, replicas, streams),
            backward_s,
            merged_bytes=merged_bytes,
            rounding=rounding,
            pace=pace,
            poll_s=poll_s,
        )
    if sync is Sync.THREE_PHASE:
        pauses_s = waves_of(others) * idle_s(up_s, latency_s)
        waiting_s = pace.waits_s(others * up_s, others, others * down_s, others)
        moved_s = others * (up_s + down_s) + pauses_s + spread_s + 4 * latency_s + both_late_s + waiting_s
    elif sync is Sync.ALL_REDUCE:
        late_s = found_late_s(poll_s, others, others * replicas * down_s) + found_late_s(poll_s, replicas)
        moved_s = all_reduce_s(*link, latency_s, pace) + late_s
    elif sync is Sync.HIERARCHICAL:
        cut = usual_streams(sync, replicas, streams)
        moved_s = hierarchical_s(*link, latency_s, cut, merged_bytes=merged_bytes, pace=pace, poll_s=poll_s)
    else:
        reduce_s: Array = up_s + (replicas - 2) * np.maximum(up_s, down_s) + down_s
        paced_s = max(others * pace.put_s - pace.free_put_s, others * pace.get_s - pace.free_get_s)
        reduce_s = np.maximum(reduce_s, up_s + paced_s + down_s)
        moved_s = reduce_s + spread_s + (2 + replicas) * latency_s + (replicas + 1) * poll_s / 3
    if rounding is None:
        return moved_s
    groups = usual_streams(sync, replicas, streams).groups
    longer_s: Array = sum(unhidden_s(sync, gradient_bytes, merged_bytes, replicas, (1, groups, 1), rounding))
    return moved_s + longer_s


def limit_s(
    gradient_bytes: Array | float, replicas: int, up: Array | float, down: Array | float, latency_s: float
) -> Array:
    """Seconds below which no algorithm sums the gradients."""
    size = np.asarray(gradient_bytes, dtype=np.float64)
    moved_s: Array = np.maximum(size / up, 2 * size * (replicas - 1) / (replicas * down))
    return moved_s + 2 * latency_s


def streamed_s(
    gradient_bytes: Array | float,
    replicas: int,
    up: Array | float,
    down: Array | float,
    latency_s: float,
    cut: Streams | Cut,
    *,
    merged_bytes: Array | float | None = None,
    added_s: Array | float = 0.0,
    pace: Pace = UNPACED,
    poll_s: float = 0.0,
) -> Array:
    """Seconds of the streamed scatter-reduce, in which raw objects go before merged ones.

    Exact where the downlink is no faster than the uplink and no request waits to be opened. A piece is summed `added_s`
    after it has come from all. Then merged object j waits for its share of the raw pieces and for the objects before
    it; all read it after all raw pieces and the merged objects before it. So the last one is read when, for some
    objects i <= j, object i has been reduced, i to j have gone up, and j and those behind it have come down. That is a
    convex function of i and j, whose largest value lies at (1, 1), (1, last) or (last, last).

    Where gets of pieces find no room, as many others have to end first, and each then has its latency.

    A get of a sum is open while it waits, and may leave no room for those of later rounds: for two latencies, until the
    others have put their sums, and these come. So as many gets as may be open share their seconds.
    Or the sums of as many objects as have room come first, then the pieces of later rounds and all sums; or then the
    other objects, lot by lot, each with the latencies of its pieces and its sums. That is an estimate; the
    ways that are best for a gradient take at most 5 % more or less (`tests/partitioner/test_sync_time.py`).
    """
    others, merged = replicas - 1, np.minimum(cut.merged, cut.rounds)
    split = np.asarray(gradient_bytes, dtype=np.float64) / replicas
    sums = split if merged_bytes is None else np.asarray(merged_bytes, dtype=np.float64) / replicas
    readers = -(-others // np.minimum(cut.groups, others))
    puts = cut.rounds * -(-others // readers)
    raw_up_s = pace.puts(others * split / up, puts)
    raw_down_s = pace.gets(others * split / down, others * np.asarray(cut.rounds))
    sums_up_s, sums_down_s = pace.puts(sums / up, merged), pace.gets(others * sums / down, others * merged)
    first_up_s = pace.puts(readers / cut.rounds * (split / up), 1)
    first_down_s = pace.gets(readers / cut.rounds * (split / down), readers)
    put_s, read_s = sums_up_s / merged, sums_down_s / merged
    pause_s = idle_s(first_up_s, latency_s)
    hop_s = 2 * latency_s + found_late_s(poll_s, replicas, raw_down_s)
    last_hop_s = 2 * latency_s + found_late_s(poll_s, replicas, sums_down_s)
    all_up_s = raw_up_s + waves_of(puts) * pause_s
    raw_s = np.maximum(first_up_s + raw_down_s, all_up_s + first_down_s) + hop_s
    room = open_downloads(replicas)
    sums_before = np.maximum(merged + -5 // (cut.rounds // merged), 0)  # asked for before the last pieces
    full = others * (cut.rounds + sums_before) - room
    opened_s = first_up_s + 3 * latency_s + (full + 1) / others * (raw_down_s / cut.rounds)
    raw_s = np.where(full > 0, np.maximum(raw_s, opened_s), raw_s)
    last_s = put_s + read_s + last_hop_s + added_s
    late_s: Array = raw_s + np.maximum(sums_down_s, last_s)
    if (np.asarray(merged) == 1).all():
        return late_s

    early_up_s = raw_up_s / merged + waves_of(puts / merged) * pause_s
    reduced_s = np.maximum(first_up_s + raw_down_s / merged, early_up_s + first_down_s)
    begun_s = np.maximum(reduced_s + added_s + hop_s, all_up_s) + last_hop_s
    waiting_s = read_s + waves_of(merged) * idle_s(put_s, latency_s) + sums_up_s

    fit = max(room // others, 1)
    each, lots = cut.rounds / np.asarray(merged), np.ceil(merged / fit) - 1
    latencies = 2 + others / room * (cut.rounds + 2 * np.asarray(merged))
    shared_s = (
        first_up_s
        + hop_s
        + last_hop_s
        + latency_s * (latencies - 4)
        + (others * (sums_up_s + sums_down_s) + raw_down_s) / room
    )
    before = fit * each + 1 + (room % others > 0)
    moved_s = np.maximum(0.0, 1 - before / cut.rounds) * raw_down_s + sums_down_s
    in_lots_s = lots * (each + 1) * latency_s + lots / merged * (sums_up_s + sums_down_s) + read_s
    early_s = begun_s + np.maximum(put_s + np.maximum(moved_s, in_lots_s), waiting_s)
    found: Array = np.where(np.asarray(merged) == 1, late_s, np.maximum(np.maximum(early_s, late_s), shared_s))
    return found


def exchange_s(
    gradient_bytes: Array | float,
    replicas: int,
    up: Array | float,
    down: Array | float,
    latency_s: float,
    cut: Streams | Cut,
    pace: Pace = UNPACED,
    poll_s: float = 0.0,
) -> Array:
    """Seconds in which every replica writes everything, in rounds, and reads everything from the others.

    The last chunk is read when all those have come down that follow the first one, the first one that had to wait for
    the last puts to be opened, or the last one.
    """
    chunk = np.asarray(gradient_bytes, dtype=np.float64) / cut.rounds
    put_s, read_s, rounds = chunk / up, (replicas - 1) * chunk / down, np.asarray(cut.rounds)
    put_s = put_s + (pace.puts(rounds * put_s, rounds) - rounds * put_s) / rounds
    read_s = read_s + (pace.gets(rounds * read_s, (replicas - 1) * rounds) - rounds * read_s) / rounds
    waited = (np.asarray(cut.rounds) - 1) // OPEN_UPLOADS * OPEN_UPLOADS
    stopped_s = waves_of(cut.rounds) * idle_s(put_s, latency_s)
    late_s = stopped_s + np.maximum((waited + 1) * put_s + (cut.rounds - waited) * read_s, cut.rounds * put_s + read_s)
    moved_s: Array = np.maximum(put_s + cut.rounds * read_s, late_s)
    return moved_s + 2 * latency_s + found_late_s(poll_s, replicas, rounds * read_s)


def exposed_s(
    sync: Sync,
    gradient_bytes: Array | float,
    replicas: int,
    up: Array | float,
    down: Array | float,
    latency_s: float,
    cut: Streams | Cut,
    backward_s: Array | float,
    *,
    merged_bytes: Array | float | None = None,
    rounding: Rounding | None = None,
    pace: Pace = UNPACED,
    poll_s: float = 0.0,
) -> Array:
    """Seconds that a way in rounds takes beyond the backward during which it begins.

    The backward completes its rounds one by one, evenly over its `backward_s`, or at its end where that is 0. All of
    these but the last round's share is gained; what is left is at least the time of the last round alone, and of all
    sums that travel in one object with its own, after a backward that `rounding` of the other rounds has prolonged.
    """
    link = (replicas, up, down, latency_s)
    sums = np.asarray(gradient_bytes if merged_bytes is None else merged_bytes, dtype=np.float64)

    def form(cut: Streams | Cut, share: Array | float, merged_share: Array | float) -> Array:
        size = share * np.asarray(gradient_bytes, dtype=np.float64)
        first_s = added_s = last_s = 0.0
        if rounding is not None:
            counts = cut.rounds, cut.groups, cut.merged
            first_s, added_s, last_s = unhidden_s(sync, size, merged_share * sums, replicas, counts, rounding)
        if sync is Sync.EXCHANGE:
            return exchange_s(size, *link, cut, pace, poll_s) + (first_s + added_s + last_s)
        merged = merged_share * sums
        if sync is Sync.TREE:
            moved_s = tree_s(size, *link, cut, merged_bytes=merged, pace=pace, poll_s=poll_s)
            return moved_s + (first_s + added_s + last_s)
        moved_s = streamed_s(size, *link, cut, merged_bytes=merged, added_s=added_s, pace=pace, poll_s=poll_s)
        return moved_s + (first_s + last_s)

    share, last = 1 / np.asarray(cut.rounds), cut.rounds // np.minimum(cut.merged, cut.rounds)
    longer_s: Array | float = 0.0
    if rounding is not None:
        beside_s = (1 - share) * rounding.lost * all_s(sync, gradient_bytes, sums, replicas, rounding, cut.groups)
        longer_s = np.where(np.asarray(backward_s) > 0, beside_s, 0.0)
    whole_s = form(cut, 1.0, 1.0) - (1 - share) * np.asarray(backward_s)
    exposed: Array = np.maximum(whole_s, form(Cut(1, cut.groups, 1), share, last * share) + longer_s)
    return exposed


def all_reduce_s(
    gradient_bytes: Array | float,
    replicas: int,
    up: Array | float,
    down: Array | float,
    latency_s: float,
    pace: Pace = UNPACED,
) -> Array:
    """Seconds in which one replica adds up what all others write (LambdaML, Jiang et al., SIGMOD 2021)."""
    size = np.asarray(gradient_bytes, dtype=np.float64)
    moved_s: Array = 2 * size / up + replicas * size / down
    put_s, read_s, others = size / up, (replicas - 1) * size / down, replicas - 1
    waiting_s = pace.puts(put_s, 1) - put_s + np.maximum(others * pace.one_get_s - pace.free_get_s, 0.0)
    gathered_s = others * pace.one_get_s / min(replicas, STAGE_PREFIXES) - pace.free_get_s
    waiting_s = waiting_s + np.maximum(size / down + gathered_s - read_s, 0.0)
    whole_s: Array = moved_s + 4 * latency_s + waiting_s
    return whole_s


def hierarchical_s(
    gradient_bytes: Array | float,
    replicas: int,
    up: Array | float,
    down: Array | float,
    latency_s: float,
    cut: Streams,
    *,
    merged_bytes: Array | float | None = None,
    pace: Pace = UNPACED,
    poll_s: float = 0.0,
) -> Array:
    """Seconds in which groups of replicas sum by streams, and columns of groups so sum what each member has added.

    By hand: 6 replicas in two groups of three with 120 bytes each, 10 bytes/s each way, no latency, two raw objects of
    each. In a group 40 bytes go up in 4 s, and while the next 40 do, these come down: 12 s. Over groups, 20 bytes go up
    and come down, and their sum again: 8 s. Sums of 40 bytes go up in 4 s, and those of two others come down in 8 s.

    >>> float(hierarchical_s(120, 6, 10, 10, 0, Streams(1, 2, 1)))
    32.0
    """
    members = members_of_group(replicas)
    link, merged = (up, down, latency_s), gradient_bytes if merged_bytes is None else merged_bytes
    seconds = streamed_s(gradient_bytes, members, *link, cut, merged_bytes=merged, pace=pace, poll_s=poll_s)
    if members < replicas:
        size, columns, once = gradient_bytes / members, replicas // members, Streams(1, 1, 1)
        seconds = seconds + streamed_s(
            size, columns, *link, once, merged_bytes=merged / members, pace=pace, poll_s=poll_s
        )
    return seconds


def tree_s(
    gradient_bytes: Array | float,
    replicas: int,
    up: Array | float,
    down: Array | float,
    latency_s: float,
    cut: Streams | Cut,
    *,
    merged_bytes: Array | float | None = None,
    pace: Pace = UNPACED,
    poll_s: float = 0.0,
) -> Array:
    """Seconds in which replicas sum in a tree, round by round (`comm.group_patterns.Tree`).

    The first round takes a latency, a put and a latency to each level, and there the bodies of the children that come
    last. Other rounds follow it at the pace of a leaf's puts, or of the gets of a replica that adds; that one reads all
    sums besides. Of paths to the first replica, those from the lowest leaves count, and those from full levels above.
    Exact for one round; for more up to an eighth too low, mostly exact (`tests/partitioner/test_sync_time.py`). Each
    object below a prefix is asked for once in a round, but the sums by all.

    By hand: 7 replicas with a fan-in of 2 and 60 bytes each, 10 bytes/s each way, no latency, in one round. A leaf's
    put takes 6 s, and its parent's two gets 12 s; so do those of the next level. The sum goes in 6 s and comes in 6 s.

    >>> float(tree_s(60, 7, 10, 10, 0, Streams(1, 2, 1)))
    48.0
    """
    rounds, fan_in = int(cut.rounds), min(int(cut.groups), replicas - 1)
    piece = np.asarray(gradient_bytes, dtype=np.float64) / rounds
    sums = piece if merged_bytes is None else np.asarray(merged_bytes, dtype=np.float64) / rounds
    put_s, sum_put_s = (pace.puts(rounds * each / up, rounds) / rounds for each in (piece, sums))
    get_s, sum_get_s, asked_s = piece / down, sums / down, max(pace.get_s - pace.free_get_s, 0.0)
    up_s = 2 * latency_s + found_late_s(poll_s, fan_in, fan_in * get_s) + put_s
    back_s = 2 * latency_s + found_late_s(poll_s, replicas) + sum_put_s + sum_get_s
    waves, later = waves_of(rounds), rounds - 1
    levels = _late_bodies(replicas, fan_in)
    full = tuple((fan_in * (level + 1), fan_in) for level in range(len(levels) - 1))
    spread_s = np.maximum(later * sum_put_s + waves * idle_s(sum_put_s, latency_s), later * sum_get_s)
    spread_s = np.maximum(spread_s, rounds * (replicas - 1) * pace.one_get_s - pace.free_get_s)
    seconds: Array = np.zeros(())
    for path in filter(None, (levels, full)):
        first_s = len(path) * up_s + np.maximum(path[-1][0] * get_s, asked_s)
        paced_s = np.maximum(later * put_s + waves * idle_s(put_s, latency_s), later * pace.get_s)
        seconds = np.maximum(seconds, first_s + np.maximum(paced_s, spread_s) + back_s)
        for level, (bodies, own) in enumerate(path):
            seconds = np.maximum(seconds, first_s + later * own * get_s + back_s)
            if level + 1 < len(path):
                begun_s = (level + 1) * up_s + (bodies - own) * get_s
                seconds = np.maximum(seconds, begun_s + rounds * (own * get_s + sum_get_s))
    return seconds


@lru_cache
def _late_bodies(replicas: int, fan_in: int) -> tuple[tuple[int, int], ...]:
    """Return, for each level of a tree from the lowest parents on, the bodies of a round that pass one after the other
    until the slowest replica there has all of it, and how many of these it gets itself.

    The lowest leaves, all alike, are shared out: of their parents all but the last one get `fan_in`, and so on.

    >>> _late_bodies(7, 2), _late_bodies(6, 2)
    (((2, 2), (4, 2)), ((2, 2), (3, 2)))
    """
    depth = tree_depth(replicas, fan_in)
    alike, bodies, last = replicas - sum(fan_in**level for level in range(depth)), 0, None
    found = []
    for _ in range(depth):
        full, left = divmod(alike, fan_in)
        partly = left + (last is not None)
        if last is not None:
            last = max(last + 1, bodies if left else 0) + left
        elif left:
            last = bodies + left
        if full:
            alike, bodies = full, bodies + fan_in
            found.append((bodies, fan_in))
        else:
            assert last is not None
            alike, bodies, last = 1, last, None
            found.append((bodies, partly))
    return tuple(found)
