"""A hundred gigabytes that lie nowhere: which shards each function reads of them."""

import itertools
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from funcpipe import data
from funcpipe.client.follow.results import Progress
from funcpipe.data import DataFactory
from funcpipe.errors import RunInterrupted
from funcpipe.platforms.base import RequestMeter, Storage
from funcpipe.platforms.wrappers import RETRY_S, Counted
from tests.support.data_reads import Reads, RecordReads, data_job, train_in_threads
from tests.support.shard_files import MadeUpShards, as_pair

SHARD_SAMPLES = 10


@dataclass(frozen=True)
class MadeUp:
    """Opens a dataset that is made up, whatever the URL."""

    shards: int
    width: int

    def __call__(
        self,
        url: str,
        *,
        retry_s: float = RETRY_S,
        first_s: float | None = None,
        meter: RequestMeter | None = None,
        crowd_s: float | None = None,
    ) -> Storage:
        return Counted(MadeUpShards(self.shards, SHARD_SAMPLES, self.width), meter)


def train_some_steps(folder: Path, shards: int, width: int, steps: int, **options: float) -> dict[str, Reads]:
    """What each has read when a run over 2 stages and 2 replicas, of 16 samples a step, was ended after some steps."""

    def end(progress: Progress) -> None:
        if progress.step >= steps:
            raise KeyboardInterrupt

    record = RecordReads(folder, MadeUp(shards, width))
    factory: DataFactory = replace(data.mds("s3://nowhere/large", transform=as_pair, cache_mb=8), open_storage=record)
    _, job = data_job(factory, width=width)
    assert job.samples == shards * SHARD_SAMPLES
    with pytest.raises(RunInterrupted):
        train_in_threads(job, on_progress=end)
    assert job.shards is not None
    for replica in range(2):
        trained = [step.micro_batches[replica::2] for step in itertools.islice(job.batches.steps_from(0, 1), 200)]
        own = {f"shard.{i // SHARD_SAMPLES:05d}.mds" for step in trained for m in step for i in m}
        for stage in range(2):
            read = set(record.reads()[f"s{stage}.r{replica}"].requests)
            assert read <= own, "a function has read shards that it does not train on"
    return record.reads()


def assert_few_reads(reads: dict[str, Reads]) -> None:
    for stage in range(2):
        one, other = (reads[f"s{stage}.r{replica}"] for replica in range(2))
        assert not set(one.requests) & set(other.requests)
        for read in (one, other):
            assert len(read.requests) <= 30
            assert max(read.requests.values()) == 1  # the cache, of a few shards, keeps what is still needed


def test_of_thousands_of_shards_each_function_reads_its_own_few(tmp_path: Path) -> None:
    reads = train_some_steps(tmp_path, shards=3000, width=500, steps=4)
    assert_few_reads(reads)


@pytest.mark.long
def test_of_100_gb_in_100_000_shards_each_function_reads_its_own_few(tmp_path: Path) -> None:
    reads = train_some_steps(tmp_path, shards=100_000, width=26_000, steps=4)
    assert_few_reads(reads)
    assert reads["s0.r0"].bytes_by_key.most_common(1)[0][1] > 1_000_000
