"""The samples of each micro-batch: every function computes the same answer without communicating.

The order of an epoch's samples follows from (seed, epoch) alone. It is cut into global batches, and these into
micro-batches; the last of each may be shorter. With 10 samples in the order 7 0 3 9 1 4 8 2 6 5, a global batch of 6
and micro-batches of 4:

    step 0: (7 0 3 9) (1 4)        step 1: (8 2 6 5)

Of a dataset that lies in shards, each replica reads shards of its own, and few of them at a time. A dataset says how
it is divided by an attribute `shard_sizes`, the number of samples in each shard. The shards are
shuffled by (seed, epoch) and laid end to end. All full global batches take their samples from the front, the short
last one takes the tail. What the full ones take is cut into one piece for each lane, and a lane's samples are
shuffled in windows of a few shards, one window after the other. With shards A … F of 4 samples, 2 lanes, windows of 2
shards, a global batch of 8 and micro-batches of 4:

    shuffled shards    D A F | C E B      a bar is where lane 0 ends and lane 1 begins
    lane 0             (d a d a a d d a) (f f f f)
    lane 1             (e c c e c e e c) (b b b b)
    step 0             (d a d a) (e c c e)      step 1    (a d d a) (c e e c)      step 2    (f f f f) (b b b b)

Micro-batch m comes from lane m mod lanes, and goes to replica m mod replicas. So a replica reads one lane if there are
as many lanes as replicas; only a shard that a bar cuts in two is read by two.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from funcpipe.core.runstate import ShardOrder
from funcpipe.errors import DataError
from funcpipe.model.draws import layer_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One training step, maybe its epoch's last: the indices of the samples in each of its micro-batches."""

    number: int
    epoch: int
    micro_batches: tuple[tuple[int, ...], ...]
    ends_epoch: bool = False

    @property
    def samples(self) -> int:
        """The number of samples in the step's global batch."""
        return sum(len(indices) for indices in self.micro_batches)


WINDOW = 8
"""The number of shards in which a lane shuffles at a time, for a dataset that does not say `shuffle_shards`."""

_Indices = np.ndarray[tuple[int], np.dtype[np.int64]]


@runtime_checkable
class _Sharded(Protocol):
    """A dataset that lies in shards: how many samples each of them holds, in the order of their indices.

    It may have an attribute `shuffle_shards` too: in how many shards at a time samples are shuffled.
    """

    @property
    def shard_sizes(self) -> Sequence[int]:
        """The number of samples in each shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedSamples:
    """The sizes of a dataset's shards, and the order in which their samples are dealt out."""

    sizes: tuple[int, ...]
    order: ShardOrder


def sharded_samples(
    dataset: object, samples: int, *, dataset_samples: int, micro_batch: int, replicas: int
) -> ShardedSamples | None:
    """Return how the first `samples` of `dataset` are dealt out in a run that begins; None if it has no shards.

    Raises DataError if the shards do not hold the `dataset_samples` that it has.
    """
    if not isinstance(dataset, _Sharded):
        return None
    sizes = tuple(int(size) for size in dataset.shard_sizes)
    if sum(sizes) != dataset_samples or min(sizes, default=0) < 0:
        raise DataError(
            f"the dataset has {dataset_samples} samples, but its shard_sizes add up to {sum(sizes)}; they must say how "
            "many samples lie in each shard, in the order of their indices"
        )
    window = int(getattr(dataset, "shuffle_shards", WINDOW))
    ends = np.minimum(np.cumsum(sizes), samples)
    kept = tuple(size for size in np.diff(ends, prepend=0).tolist() if size)
    return ShardedSamples(
        sizes=kept,
        order=ShardOrder(lanes=replicas, micro_batch=micro_batch, window=window, digest=_digest(kept)),
    )


def _digest(sizes: Sequence[int]) -> str:
    return hashlib.sha256(np.asarray(sizes, np.dtype("<i8")).tobytes()).hexdigest()[:16]


@dataclass(frozen=True)
class _Lane:
    """A piece of the shuffled shards, from `start` to `stop` of their samples; each step takes `width` of them."""

    number: int
    start: int
    stop: int
    width: int


class _ShardedEpoch:
    """The order of one epoch's samples; only the windows that are read from are made."""

    def __init__(self, shards: ShardedSamples, *, global_batch: int, seed: int, epoch: int) -> None:
        sizes = np.asarray(shards.sizes, np.int64)
        shuffled = torch.randperm(len(sizes), generator=_generator(seed, epoch, 0, "shards")).numpy()
        self._order, self._seed, self._epoch = shards.order, seed, epoch
        self._global_batch, self._samples = global_batch, int(sizes.sum())
        self._firsts = (np.cumsum(sizes) - sizes)[shuffled]  # the index of each shard's first sample
        self._ends = np.cumsum(sizes[shuffled])  # where each shard ends, when they lie end to end
        self._lanes = self._cut(self._samples // global_batch)
        self._windows: dict[int, tuple[int, _Indices]] = {}  # of each lane the newest: its number, and what it holds

    def batch(self, number: int) -> tuple[int, ...]:
        """Return the samples of the epoch's global batch of that number."""
        first = number * self._global_batch
        if first + self._global_batch > self._samples:
            return tuple(self._at(first, self._samples).tolist())
        taken = [iter(self._take(lane, number)) for lane in self._lanes]
        return tuple(next(taken[self._lane_of(position)]) for position in range(self._global_batch))

    def _cut(self, steps: int) -> tuple[_Lane, ...]:
        lane_of = [self._lane_of(position) for position in range(self._global_batch)]
        lanes, start = list[_Lane](), 0
        for number in range(max(lane_of) + 1):
            width = lane_of.count(number)
            lanes.append(_Lane(number=number, start=start, stop=start + steps * width, width=width))
            start = lanes[-1].stop
        return tuple(lanes)

    def _lane_of(self, position: int) -> int:
        """Return the lane that the sample at a position of a global batch comes from."""
        return position // self._order.micro_batch % self._order.lanes

    def _take(self, lane: _Lane, number: int) -> list[int]:
        begin, stop = lane.start + number * lane.width, lane.start + (number + 1) * lane.width
        taken: list[int] = []
        while begin < stop:
            window, first, after = self._window_at(lane, begin)
            taken += self._shuffled(lane, window, first, after)[begin - first : min(stop, after) - first].tolist()
            begin = after
        return taken

    def _window_at(self, lane: _Lane, place: int) -> tuple[int, int, int]:
        """Return the number of the window that `place` lies in, and where it begins and ends."""
        first_shard, shard = np.searchsorted(self._ends, [lane.start, place], side="right").tolist()
        window = (shard - first_shard) // self._order.window
        begin = first_shard + window * self._order.window
        last = min(begin + self._order.window, len(self._ends)) - 1
        first = max(lane.start, int(self._ends[begin - 1]) if begin else 0)
        return window, first, min(lane.stop, int(self._ends[last]))

    def _shuffled(self, lane: _Lane, window: int, first: int, after: int) -> _Indices:
        if self._windows.get(lane.number, (None,))[0] != window:
            generator = _generator(self._seed, self._epoch, lane.number, f"window {window}")
            samples = self._at(first, after)[torch.randperm(after - first, generator=generator).numpy()]
            self._windows[lane.number] = window, samples
        return self._windows[lane.number][1]

    def _at(self, first: int, after: int) -> _Indices:
        """Return the indices of the samples that lie at [first, after) of the shuffled shards."""
        places = np.arange(first, after)
        shards = np.searchsorted(self._ends, places, side="right")
        starts = np.concatenate([[0], self._ends[:-1]])[shards] if len(places) else places
        return np.asarray(self._firsts[shards] + places - starts, np.int64)


def _generator(seed: int, epoch: int, lane: int, name: str) -> torch.Generator:
    return torch.Generator().manual_seed(layer_seed(seed, epoch, lane, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """A dataset of `samples` samples, cut into steps; without `shuffle`, in the dataset's own order.

    With `drop_last`, an epoch ends before a global batch that is not full. With `shards`, the order is one that lets
    each replica read shards of its own.
    """

    samples: int
    global_batch: int
    micro_batch: int
    seed: int
    shuffle: bool = True
    shards: ShardedSamples | None = None
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.samples < self.global_batch:
            raise DataError(
                f"the dataset has {self.samples} samples, too few for one global batch of {self.global_batch}; "
                "plan for a smaller batch or give more data"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Global batches of an epoch, including a short last one unless that is dropped."""
        return self.samples // self.global_batch + (not self.drop_last and self.samples % self.global_batch > 0)

    @property
    def micro_batch_sizes(self) -> frozenset[int]:
        """The numbers of samples in micro-batches, the last of a global batch and of an epoch included."""
        sizes = set()
        last = 0 if self.drop_last else self.samples % self.global_batch
        for samples in {min(self.global_batch, self.samples), last}:
            sizes |= {min(self.micro_batch, samples), samples % self.micro_batch}
        return frozenset(sizes - {0})

    def beside(self, index: int) -> int:
        """Return a sample that may lie in one micro-batch with that at `index`: the first one that does, or of all."""
        if self.shuffle:
            return 0 if self.micro_batch > 1 else index
        return index - index % self.global_batch % self.micro_batch

    def micro_batches_of(self, step: int) -> int:
        """Return the number of micro-batches of step `step`, numbered from the start of training."""
        return -(-self.samples_of(step) // self.micro_batch)

    def samples_of(self, step: int) -> int:
        """Return the number of samples of step `step`, numbered from the start of training."""
        first_sample = step % self.steps_per_epoch * self.global_batch
        return min(self.global_batch, self.samples - first_sample)

    def steps_from(self, first: int, epochs: int) -> Iterator[Step]:
        """Yield the steps of `epochs` epochs of training, without the first `first` steps."""
        for epoch in range(first // self.steps_per_epoch, epochs):
            yield from self._steps(epoch, max(first - epoch * self.steps_per_epoch, 0))

    def epoch(self, epoch: int) -> tuple[Step, ...]:
        """Return the steps of one epoch, numbered from the start of training."""
        return tuple(self._steps(epoch, 0))

    def _steps(self, epoch: int, first: int) -> Iterator[Step]:
        """Yield the steps of one epoch, without its first `first`; each is made when it is asked for."""
        batch = self._batches_of(epoch)
        for number in range(first, self.steps_per_epoch):
            yield Step(
                number=epoch * self.steps_per_epoch + number,
                epoch=epoch,
                micro_batches=_cut(batch(number), self.micro_batch),
                ends_epoch=number == self.steps_per_epoch - 1,
            )

    def _batches_of(self, epoch: int) -> Callable[[int], Sequence[int]]:
        """Return a function that gives the samples of each global batch of an epoch, by its number."""
        if self.shards is not None and self.shuffle:
            return _ShardedEpoch(self.shards, global_batch=self.global_batch, seed=self.seed, epoch=epoch).batch
        order = sample_order(self.samples, self.seed, epoch) if self.shuffle else range(self.samples)
        return lambda number: order[number * self.global_batch : (number + 1) * self.global_batch]


def sample_order(samples: int, seed: int, epoch: int) -> tuple[int, ...]:
    """Return the order of the sample indices 0 … `samples` - 1 in one epoch."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return tuple(torch.randperm(samples, generator=generator).tolist())


def _cut(items: Sequence[int], size: int) -> tuple[Any, ...]:
    return tuple(tuple(items[i : i + size]) for i in range(0, len(items), size))
