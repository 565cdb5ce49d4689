"""The order of samples, also of those in shards: every sample once, the same for all, few shards for each replica."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.errors import DataError
from funcpipe.training.batches import WINDOW, Batches, ShardedSamples, sample_order, sharded_samples


@given(st.integers(1, 200), st.integers(0, 2**40), st.integers(0, 5))
def test_the_order_is_a_permutation_that_follows_from_seed_and_epoch_alone(samples: int, seed: int, epoch: int) -> None:
    order = sample_order(samples, seed, epoch)
    assert sorted(order) == list(range(samples))
    torch.manual_seed(1)
    torch.randn(3)
    assert sample_order(samples, seed, epoch) == order


@given(st.integers(1, 200), st.integers(1, 30), st.integers(1, 9), st.booleans())
def test_a_last_batch_that_is_dropped_is_the_only_difference(
    samples: int, global_batch: int, micro_batch: int, shuffle: bool
) -> None:
    if samples < global_batch:
        return
    whole = Batches(samples=samples, global_batch=global_batch, micro_batch=micro_batch, seed=1, shuffle=shuffle)
    dropping = replace(whole, drop_last=True)
    full = [step for step in whole.epoch(0) if step.samples == global_batch]
    found = dropping.epoch(0)
    assert [step.micro_batches for step in found] == [step.micro_batches for step in full]
    assert [step.ends_epoch for step in found] == [False] * (len(found) - 1) + [True]
    sizes = {len(indices) for step in found for indices in step.micro_batches}
    assert sizes == dropping.micro_batch_sizes
    assert dropping.steps_per_epoch == samples // global_batch


def test_epochs_and_seeds_differ() -> None:
    orders = {sample_order(50, seed, epoch) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


@dataclass
class InShards:
    shard_sizes: Sequence[int]


@dataclass
class InFewAtATime(InShards):
    shuffle_shards: int


def batches(sizes: Sequence[int], *, replicas: int, micro_batch: int, global_batch: int, window: int = 2) -> Batches:
    samples = sum(sizes)
    shards = sharded_samples(
        InFewAtATime(sizes, window), samples, dataset_samples=samples, micro_batch=micro_batch, replicas=replicas
    )
    return Batches(samples=samples, global_batch=global_batch, micro_batch=micro_batch, seed=3, shards=shards)


def shards_of(sizes: Sequence[int], samples: Sequence[int]) -> set[int]:
    return set(np.searchsorted(np.cumsum(sizes), samples, side="right").tolist())


@st.composite
def dealt(draw: st.DrawFn) -> tuple[tuple[int, ...], int, Batches]:
    sizes = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=30).filter(lambda sizes: sum(sizes) > 0)))
    micro_batch = draw(st.integers(1, 4))
    global_batch = min(draw(st.integers(1, 24)), sum(sizes))
    replicas = draw(st.integers(1, 4))
    window = draw(st.integers(1, 5))
    made = batches(sizes, replicas=replicas, micro_batch=micro_batch, global_batch=global_batch, window=window)
    return sizes, replicas, made


@given(dealt(), st.integers(0, 3))
def test_an_epoch_has_every_sample_once_in_batches_of_the_usual_sizes(
    dealt: tuple[tuple[int, ...], int, Batches], epoch: int
) -> None:
    """In shards or not, remainders included."""
    for made in (dealt[2], replace(dealt[2], shards=None)):
        steps = made.epoch(epoch)
        assert sorted(i for step in steps for m in step.micro_batches for i in m) == list(range(made.samples))
        assert [step.number for step in steps] == list(range(epoch * len(steps), (epoch + 1) * len(steps)))
        assert {step.epoch for step in steps} == {epoch}
        assert len(steps) == made.steps_per_epoch
        assert made.micro_batch_sizes == {len(m) for step in steps for m in step.micro_batches}
        assert all(step.samples == made.global_batch for step in steps[:-1])
        assert all(len(m) == made.micro_batch for step in steps for m in step.micro_batches[:-1])


@given(dealt(), st.data())
def test_who_starts_anywhere_or_has_another_plan_deals_out_the_same_batches(
    dealt: tuple[tuple[int, ...], int, Batches], data: st.DataObject
) -> None:
    _, _, made = dealt
    steps = [step for epoch in range(2) for step in made.epoch(epoch)]
    first = data.draw(st.integers(0, len(steps)))
    assert list(made.steps_from(first, 2)) == steps[first:]
    other = replace(made, micro_batch=data.draw(st.integers(1, 6)))
    assert [[i for m in step.micro_batches for i in m] for step in other.steps_from(first, 2)] == [
        [i for m in step.micro_batches for i in m] for step in steps[first:]
    ]


@given(dealt(), st.integers(0, 2))
def test_only_cut_shards_are_read_by_two_replicas(dealt: tuple[tuple[int, ...], int, Batches], epoch: int) -> None:
    sizes, replicas, made = dealt
    full = [step for step in made.epoch(epoch) if step.samples == made.global_batch]
    read = [
        shards_of(sizes, [i for step in full for m in step.micro_batches[replica::replicas] for i in m])
        for replica in range(replicas)
    ]
    used = set().union(*read)
    assert sum(map(len, read)) <= len(used) + replicas - 1


@given(dealt())
def test_a_replica_reads_one_window_at_a_time_and_comes_back_to_none(
    dealt: tuple[tuple[int, ...], int, Batches],
) -> None:
    sizes, replicas, made = dealt
    assert made.shards is not None
    full = [step for step in made.epoch(1) if step.samples == made.global_batch]
    for replica in range(replicas):
        samples = [i for step in full for m in step.micro_batches[replica::replicas] for i in m]
        where = [next(iter(shards_of(sizes, [i]))) for i in samples]
        last = {shard: place for place, shard in enumerate(where)}
        first = {shard: where.index(shard) for shard in last}
        for place in range(len(where)):
            open_now = [shard for shard in last if first[shard] <= place <= last[shard]]
            assert len(open_now) <= made.shards.order.window


def test_epochs_and_windows_are_shuffled() -> None:
    made = batches([10] * 8, replicas=2, micro_batch=5, global_batch=20, window=2)
    orders = {tuple(i for s in made.epoch(epoch) for m in s.micro_batches for i in m) for epoch in range(4)}
    assert len(orders) == 4
    assert all(list(m) != sorted(m) for m in made.epoch(0)[0].micro_batches)


def test_the_order_is_the_one_that_runs_have_begun_with() -> None:
    """A run that is resumed by a newer version goes on with the same samples."""
    made = batches([3, 4, 2, 3], replicas=2, micro_batch=2, global_batch=4)
    assert [step.micro_batches for step in made.epoch(0)] == GOLDEN


GOLDEN = [((11, 1), (6, 7)), ((0, 10), (4, 5)), ((2, 9), (3, 8))]


def test_a_hundred_thousand_shards_take_no_time_and_little_memory() -> None:
    made = batches([10] * 100_000, replicas=2, micro_batch=8, global_batch=64, window=16)
    steps = made.steps_from(5_000, 1)
    first = next(steps)
    assert first.number == 5_000
    assert len(shards_of([10] * 100_000, [i for m in first.micro_batches[::2] for i in m])) <= 2 * 16


def test_without_shuffle_shards_lie_in_their_own_order() -> None:
    made = replace(batches([2, 3], replicas=2, micro_batch=1, global_batch=2), shuffle=False)
    assert [step.micro_batches for step in made.epoch(1)] == [((0,), (1,)), ((2,), (3,)), ((4,),)]


def test_plain_datasets_have_no_shards() -> None:
    assert sharded_samples([1, 2], 2, dataset_samples=2, micro_batch=1, replicas=1) is None


def test_fewer_samples_are_those_of_the_first_shards() -> None:
    found = sharded_samples(InShards([3, 0, 4, 5]), 5, dataset_samples=12, micro_batch=2, replicas=2)
    assert isinstance(found, ShardedSamples)
    assert found.sizes == (3, 2)
    assert found.order.window == WINDOW


def test_shards_that_hold_other_samples_are_refused() -> None:
    with pytest.raises(DataError, match="has 6 samples, but its shard_sizes add up to 5; they must say how many"):
        sharded_samples(InShards([2, 3]), 6, dataset_samples=6, micro_batch=1, replicas=1)


def test_the_order_can_be_the_dataset_s_own() -> None:
    batches = Batches(samples=5, global_batch=4, micro_batch=2, seed=3, shuffle=False)
    assert [step.micro_batches for step in batches.epoch(7)] == [((0, 1), (2, 3)), ((4,),)]


def test_data_too_short_for_one_batch_is_refused() -> None:
    with pytest.raises(DataError, match="3 samples, too few for one global batch of 4; plan for a smaller batch"):
        Batches(samples=3, global_batch=4, micro_batch=2, seed=0)
