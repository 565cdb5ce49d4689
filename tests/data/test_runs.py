"""Runs on data in shards: resumed by another plan, they go on in the same order."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.data import IterableDataset

from funcpipe import data
from funcpipe.client.follow.results import Progress
from funcpipe.client.prepare.job import Job
from funcpipe.core import RunSettings
from funcpipe.errors import DataError, PlanError
from funcpipe.platforms.base import RequestMeter
from funcpipe.testing.faults import ClientKilled
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.training.data_source import LoaderOptions, prepare_data
from tests.support.data_reads import data_job, train_in_threads
from tests.support.shard_files import as_pair, write_mds


def job_of(folder: Path, shard_samples: int, *, replicas: int, micro_batch: int, samples: int = 160) -> Job:
    (folder / f"of {shard_samples}").mkdir(exist_ok=True)
    write_mds(folder / f"of {shard_samples}", samples, shard_samples)
    url = f"file://{folder}/of%20{shard_samples}"
    return data_job(data.mds(url, transform=as_pair), replicas=replicas, micro_batch=micro_batch)[1]


def leave_after(step: int, job: Job) -> MemoryStorage:
    """What a run leaves that is ended early."""

    def end(progress: Progress) -> None:
        if progress.step >= step:
            raise ClientKilled

    storage = MemoryStorage()
    with pytest.raises(ClientKilled):
        train_in_threads(job, storage, settings=RunSettings(name="left"), on_progress=end)
    return storage


def test_a_run_that_is_resumed_by_another_plan_goes_on_in_the_order_that_it_began_with(tmp_path: Path) -> None:
    job = job_of(tmp_path, 5, replicas=2, micro_batch=4)
    whole = train_in_threads(job)
    storage = leave_after(3, job)
    other = job_of(tmp_path, 5, replicas=1, micro_batch=8)
    assert other.shards != job.shards
    resumed = train_in_threads(other, storage, settings=RunSettings(resume="left"))
    assert resumed.losses == pytest.approx(whole.losses, rel=1e-12)
    for name, tensor in whole.tensors.items():
        torch.testing.assert_close(resumed.tensors[name], tensor, rtol=1e-10, atol=1e-12)


def test_a_run_is_not_resumed_on_other_shards(tmp_path: Path) -> None:
    storage = leave_after(2, job_of(tmp_path, 5, replicas=2, micro_batch=4))
    other = job_of(tmp_path, 8, replicas=2, micro_batch=4)
    with pytest.raises(PlanError, match=r"run left has begun with samples that lie in shards .* resume it with"):
        train_in_threads(other, storage, settings=RunSettings(resume="left"))
    with pytest.raises(PlanError, match="the data's now lie in no shards; resume it with the data"):
        train_in_threads(replace(other, shards=None), storage, settings=RunSettings(resume="left"))


def test_what_is_asked_of_the_storage_is_counted_for_the_bill(tmp_path: Path) -> None:
    job, meter = job_of(tmp_path, 5, replicas=2, micro_batch=4), RequestMeter()
    prepared, storage = prepare_data(job.dataset, LoaderOptions(), table=None), MemoryStorage()
    for name, content in prepared.objects():
        storage.put(name, content)
    dataset = prepared.stored.open(storage, str, meter).dataset
    assert [len(dataset[index]) for index in (0, 1, 7)] == [2, 2, 2]
    assert meter.counts.gets == 2
    assert meter.counts.received_bytes > 0


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


@pytest.mark.parametrize("dataset", [Stream, lambda: iter([1, 2])])
def test_a_dataset_that_can_only_be_iterated_over_is_refused_with_the_way_out(dataset: object) -> None:
    with pytest.raises(DataError, match=r"give a map-style dataset.*, or write the samples as shards"):
        data_job(dataset)  # type: ignore[arg-type]
