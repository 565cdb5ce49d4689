"""Datasets in shards on an S3 server, as the libraries write them: read by index, and trained on."""

import json
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import torch

from funcpipe import data
from funcpipe.data import DataFactory
from funcpipe.errors import DataError
from funcpipe.platforms.base import RequestMeter
from tests.data.formats import FORMATS, require
from tests.support.data_reads import RecordReads, data_job, shards_of_samples, train_in_threads
from tests.support.shard_files import CLASSES, WRITERS, as_pair, features_of

Upload = Callable[[Path], str]
GOLDEN = Path(__file__).with_name("written_by_streaming.tar.gz")
"""Seven samples as mosaicml-streaming 0.13.0 has written them, with and without compression."""


def written(name: str, folder: Path, samples: int = 40, shard_samples: int = 5) -> Path:
    require(name)
    (folder / "set").mkdir()
    WRITERS[name](folder / "set", samples, shard_samples)
    return folder / "set"


def factory_of(name: str, url: str) -> DataFactory:
    made: DataFactory = getattr(data, name)(url, transform=as_pair)
    return made


@pytest.mark.parametrize("name", FORMATS)
def test_samples_are_read_by_index_from_s3_a_shard_at_a_time(name: str, tmp_path: Path, upload: Upload) -> None:
    url = upload(written(name, tmp_path))
    client = factory_of(name, url)
    assert len(client()) == 40
    meter = RequestMeter()
    dataset = cloudpickle.loads(cloudpickle.dumps(client)).open(meter)
    assert meter.counts.gets == 0  # what the client has found travels
    assert dataset.shard_sizes == (5,) * 8
    for index in (7, 39, 0, 5, -1):
        x, y = dataset[index]
        assert torch.equal(x, torch.from_numpy(features_of(index % 40)).double())
        assert y == index % 40 % CLASSES
    requests_of_a_shard = 2 if name == "parquet" else 1
    assert 3 <= meter.counts.gets <= 3 * requests_of_a_shard
    with pytest.raises(IndexError, match="has 40 samples, and none at 40"):
        dataset[40]


@pytest.mark.parametrize("name", FORMATS)
def test_a_run_reads_only_what_it_trains_on_and_equals_one_process(name: str, tmp_path: Path, upload: Upload) -> None:
    url = upload(written(name, tmp_path))
    (tmp_path / "reads").mkdir()
    record = RecordReads(tmp_path / "reads")
    model, job = data_job(replace(factory_of(name, url), open_storage=record), micro_batch=2)
    result = train_in_threads(job)
    plain = job.plain_training(model).run()
    for parameter, tensor in plain.end.items():
        torch.testing.assert_close(result.tensors[parameter], tensor, rtol=1e-9, atol=1e-12)
    reads = record.reads()
    workers = {"s0.r0", "s0.r1", "s1.r0", "s1.r1"}
    assert reads.keys() == workers | {"MainThread"}
    steps = job.batches.epoch(0)
    for worker in workers:
        replica = int(worker[-1])
        trained = {i for step in steps for m in step.micro_batches[replica::2] for i in m}
        shards = shards_of_samples(job, trained)
        assert 4 <= len(shards) <= 5
        if name != "parquet":  # where shards are parts of objects
            assert reads[worker].requests.total() == len(reads[worker].requests) == len(shards)
    if name == "parquet":
        assert reads["s0.r0"].bytes < sum(file.stat().st_size for file in (tmp_path / "set").iterdir()) * 0.7


@pytest.mark.parametrize("name", FORMATS)
def test_a_url_alone_is_read_by_what_lies_there(name: str, tmp_path: Path) -> None:
    dataset = data.from_url(f"file://{written(name, tmp_path)}")()
    x, y = as_pair(dataset[3])
    assert torch.equal(x, torch.from_numpy(features_of(3)).double())
    assert y == 0


def test_only_the_columns_that_are_asked_for_are_read(tmp_path: Path) -> None:
    url = f"file://{written('parquet', tmp_path)}"
    sizes = {}
    for columns in (None, ("x", "y")):
        factory, meter = data.parquet(url, columns=columns), RequestMeter()
        factory()
        dataset = factory.open(meter)
        assert set(dataset[12]) == {"x", "y"} | ({"unused"} if columns is None else set())
        sizes[columns] = meter.counts.received_bytes
    assert sizes["x", "y"] < sizes[None] - 4000  # a group has five of a thousand bytes


def test_a_column_that_is_not_there_is_refused(tmp_path: Path) -> None:
    url = f"file://{written('parquet', tmp_path)}"
    with pytest.raises(DataError, match=r"part-0.parquet has no column 'z'; it has x, y, unused"):
        data.parquet(url, columns=("x", "z"))()


@pytest.mark.parametrize("kind", ["raw", "zstd"])
def test_what_mosaicml_streaming_has_written_is_read(kind: str, tmp_path: Path) -> None:
    if kind == "zstd":
        require("parquet")  # whose library decompresses
    with tarfile.open(GOLDEN) as tar:
        tar.extractall(tmp_path, filter="data")
    dataset = data.mds(f"file://{tmp_path}/{kind}")()
    assert dataset.shard_sizes == (3, 2, 1, 1)
    for k in range(7):
        sample = dataset[k]
        assert {name: sample[name] for name in "itbju"} == {
            "i": k,
            "t": "é" * k + "x",
            "b": bytes(range(k)),
            "j": {"k": [k, None]},
            "u": k + 200,
        }
        assert sample["f"] == k / 3
        assert sample["a"].tolist() == [0, k, 2 * k]
        assert sample["a"].dtype == np.float32
        assert sample["n"].tolist() == list(range(k + 1))
        assert sample["d"].shape == (2, k + 1)


def test_columns_that_could_run_code_are_refused(tmp_path: Path) -> None:
    folder = written("mds", tmp_path)
    index = json.loads((folder / "index.json").read_text().replace('"int"', '"pkl"'))
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"column 'y' is encoded as 'pkl', which is not read here; encodings that are"):
        data.mds(f"file://{folder}")()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"there is neither an index.json .* nor a file that ends in .parquet; give the folder"),
        ({"index.json": "{"}, r"index.json is not JSON"),
        ({"index.json": '{"other": 1}'}, r"is of no format that is known: it has none of shards, chunks, shardlist"),
        ({"index.json": '{"shards": [{"format": "json"}]}'}, r"not of shards in the format mds; give the folder that"),
        ({"index.json": '{"shards": []}'}, r"there are no samples; give the URL of a dataset that has been written"),
        ({"index.json": '{"chunks": 3}'}, r"is not LitData's; give the folder that litdata.optimize has written"),
        (
            {"index.json": '{"shardlist": [{"url": "http://elsewhere/a.tar", "nsamples": 3}]}'},
            r"its index names http://elsewhere/a.tar, which does not lie below it; give names relative to it",
        ),
    ],
)
def test_what_is_no_dataset_is_refused_with_the_way_out(files: dict[str, str], message: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        data.from_url(f"file://{tmp_path}")()


def test_a_path_is_no_url() -> None:
    with pytest.raises(DataError, match="'/data/set' is no URL of a dataset; give one such as s3://bucket/prefix"):
        data.from_url("/data/set")


def test_shards_that_have_changed_since_the_index_was_read_are_noticed(tmp_path: Path) -> None:
    folder = written("mds", tmp_path)
    dataset = data.mds(f"file://{folder}")()
    (folder / "shard.00002.mds").write_bytes((folder / "shard.00002.mds").read_bytes()[:0] + b"\x01\0\0\0" + bytes(40))
    with pytest.raises(DataError, match=r"shard.00002.mds holds 1 samples, and 5 by the index: it has changed"):
        dataset[10]
