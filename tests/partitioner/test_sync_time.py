"""The closed forms beside a play of all replicas' transfers, event by event."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.comm.collectives import Move, pattern, transfers
from funcpipe.core import Streams, Sync
from funcpipe.partitioner.cost.stores import requests_each
from funcpipe.partitioner.cost.sync_time import (
    all_reduce_s,
    candidates,
    choose,
    exchange_s,
    limit_s,
    streamed_s,
    sync_time_s,
)
from funcpipe.platforms.catalog import load_spec
from tests.examples import at_most
from tests.partitioner.sync_links import Links, duration_s

sizes = st.floats(1e6, 1e9)
latencies = st.floats(0, 0.1)
rates = st.floats(1e7, 1e8)


@at_most(20)
@given(sizes, latencies, rates, st.integers(3, 8), st.sampled_from([1.0, 2.0]), st.data())
def test_streamed_takes_the_time_of_its_form(
    size: float, latency_s: float, rate: float, replicas: int, growth: float, data: st.DataObject
) -> None:
    """Parameters in place of sums that travel in 16 bits take twice their bytes."""
    groups = data.draw(st.sampled_from([g for g in range(1, replicas) if (replicas - 1) % g == 0]))
    merged = data.draw(st.integers(1, 4))
    streams = Streams(merged * data.draw(st.integers(1, 3)), groups, merged)
    chosen, links, sums = pattern(Sync.STREAMED, replicas, streams), Links(rate, rate, latency_s), growth * size
    played_s = duration_s(chosen, size, links, merged_bytes=sums)
    form_s = streamed_s(size, replicas, rate, rate, latency_s, streams, merged_bytes=sums)
    assert form_s == pytest.approx(played_s, rel=1e-9)
    assert played_s >= limit_s(size, replicas, rate, rate, latency_s) * (1 - 1e-9)


@at_most(20)
@given(sizes, latencies, rates, rates, st.integers(2, 6), st.integers(1, 20))
def test_an_exchange_takes_the_time_of_its_form(
    size: float, latency_s: float, up: float, down: float, replicas: int, rounds: int
) -> None:
    streams = Streams(rounds, 1, 1)
    played_s = duration_s(pattern(Sync.EXCHANGE, replicas, streams), size, Links(up, down, latency_s))
    assert exchange_s(size, replicas, up, down, latency_s, streams) == pytest.approx(played_s, rel=1e-9)


@at_most(20)
@given(sizes, latencies, rates, rates, st.integers(2, 8), st.sampled_from([1.0, 2.0]))
def test_three_phase_pipelined_and_all_reduce_take_the_time_of_their_forms(
    size: float, latency_s: float, up: float, down: float, replicas: int, growth: float
) -> None:
    links = Links(up, down, latency_s)
    for sync in (Sync.THREE_PHASE, Sync.PIPELINED):
        form_s = sync_time_s(
            sync,
            gradient_bytes=size,
            replicas=replicas,
            upload_bytes_s=up,
            download_bytes_s=down,
            latency_s=latency_s,
            merged_bytes=growth * size,
        )
        played_s = duration_s(pattern(sync, replicas), size, links, merged_bytes=growth * size)
        assert form_s == pytest.approx(played_s, rel=1e-9)
    played_s = duration_s(pattern(Sync.ALL_REDUCE, replicas), size, links)
    assert all_reduce_s(size, replicas, up, down, latency_s) == pytest.approx(played_s, rel=1e-9)


@pytest.mark.parametrize("replicas", [2, 3, 4, 8, 16])
def test_requests_are_those_of_the_transfers(replicas: int) -> None:
    ways = [*candidates(replicas), *((sync, Streams(1, 1, 1)) for sync in Sync)]
    for sync, streams in ways[::7]:
        moves = [t.move for r in range(replicas) for t in transfers(pattern(sync, replicas, streams), r)]
        puts = sum(move in (Move.PUT_SPLIT, Move.PUT_MERGED) for move in moves)
        gets = sum(move in (Move.GET_SPLIT, Move.GET_MERGED) for move in moves)
        assert requests_each(sync, replicas, streams) == pytest.approx((puts / replicas, gets / replicas))


@pytest.mark.parametrize("size", [64e6, 256e6])
@pytest.mark.parametrize("replicas", [2, 4, pytest.param(8, marks=pytest.mark.long)])
def test_the_choice_is_near_the_limit_and_never_costs_more(replicas: int, size: float) -> None:
    """At 70 MB/s and 40 ms: within 5 % of the limit where time is valuable, and else the cheapest there is."""
    spec = load_spec("aws-lambda")
    rate, price = 70e6, 1.66667e-4

    def chosen(time_value: float) -> float:
        found = choose(size, replicas, up=rate, down=rate, price_usd_s=price, spec=spec, time_value=time_value)
        played_s = duration_s(pattern(found.sync, replicas, found.streams), size, Links(rate, rate, spec.latency_s))
        assert found.time_s == pytest.approx(played_s, rel=0.02)
        return found.cost_usd if time_value == 0 else found.time_s

    for sync in (Sync.THREE_PHASE, Sync.PIPELINED):
        time_s = float(
            sync_time_s(
                sync,
                gradient_bytes=size,
                replicas=replicas,
                upload_bytes_s=rate,
                download_bytes_s=rate,
                latency_s=spec.latency_s,
            )
        )
        puts, gets = requests_each(sync, replicas, Streams(1, 1, 1))
        assert chosen(0) <= replicas * (time_s * price + puts * spec.price_put_usd + gets * spec.price_get_usd)
    assert chosen(1e5) <= 1.05 * limit_s(size, replicas, rate, rate, spec.latency_s)
