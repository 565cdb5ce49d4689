"""What each function of a run reads of a dataset in object storage: shards, requests and bytes, for each format.

``python -m experiments.studies.data_reads`` writes a set of each format into a bucket of the S3 server that the
environment names (`make s3-server`), or else into a folder, and trains one epoch over 2 stages and 2 replicas, whose
functions are threads. With ``--large`` it trains some steps on 100 GB in 100,000 shards, which are made up when they
are read.
"""

import argparse
import contextlib
import json
import os
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from funcpipe import data
from funcpipe.client.results import Progress
from funcpipe.data import DataFactory
from funcpipe.errors import RunInterrupted
from funcpipe.platforms.base import Storage
from funcpipe.platforms.catalog import open_storage
from funcpipe.platforms.request_meter import RequestMeter
from funcpipe.platforms.wrappers import RETRY_S, Counted
from funcpipe.testing.data_reads import Reads, RecordReads, data_job, train_in_threads
from funcpipe.testing.shard_files import WRITERS, MadeUpShards, as_pair

WORKERS = ("s0.r0", "s0.r1", "s1.r0", "s1.r1")
LARGE_SHARDS, LARGE_SAMPLES, LARGE_WIDTH = 100_000, 10, 26_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one function has read: `shared` of its shards were read by the other replica of its stage too."""

    data: str
    worker: str
    objects: int
    of_objects: int
    shared: int
    requests: int
    read_bytes: int
    of_bytes: int


@dataclass(frozen=True)
class MadeUp:
    """Opens the large set."""

    def __call__(
        self,
        url: str,
        *,
        retry_s: float = RETRY_S,
        first_s: float | None = None,
        meter: RequestMeter | None = None,
    ) -> Storage:
        """Its storage, whatever the URL."""
        return Counted(MadeUpShards(LARGE_SHARDS, LARGE_SAMPLES, LARGE_WIDTH), meter)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="*", default=list(WRITERS), choices=list(WRITERS))
    parser.add_argument("--samples", type=int, default=640)
    parser.add_argument("--shard-samples", type=int, default=16)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--steps", type=int, default=5, help="of the large set")
    parser.add_argument("--output", type=Path, help="a JSON file for the table")
    options = parser.parse_args()
    rows: list[Row] = []
    for name in [] if options.large else options.formats:
        rows += of_format(name, options.samples, options.shard_samples)
    if options.large:
        rows += of_large(options.steps)
    show(rows)
    if options.output:
        options.output.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def of_format(name: str, samples: int, shard_samples: int) -> Iterator[Row]:
    """One epoch of a set of that format, compared with plain PyTorch."""
    with tempfile.TemporaryDirectory() as folder:
        written, record = Path(folder, "set"), RecordReads(Path(folder, "reads"))
        written.mkdir()
        record.folder.mkdir()
        WRITERS[name](written, samples, shard_samples)
        sizes = {file.name: file.stat().st_size for file in written.iterdir() if file.name != "index.json"}
        factory: DataFactory = getattr(data, name)(uploaded(written), transform=as_pair)
        model, job = data_job(replace(factory, open_storage=record))
        result = train_in_threads(job)
        for parameter, tensor in job.plain_training(model).run().end.items():
            torch.testing.assert_close(result.tensors[parameter], tensor, rtol=1e-6, atol=1e-9)
        yield from rows_of(name, record.reads(), len(sizes), sum(sizes.values()))


def uploaded(folder: Path) -> str:
    """The URL of a copy of `folder` on the S3 server, or of the folder itself."""
    endpoint = os.environ.get("FUNCPIPE_TEST_S3")
    if endpoint is None:
        return f"file://{folder}"
    import boto3  # only with a server

    boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1").create_bucket(Bucket="funcpipe-data")
    url = f"s3://funcpipe-data/{uuid.uuid4().hex}?endpoint={endpoint}&region=us-east-1"
    storage = open_storage(url)
    for file in folder.iterdir():
        storage.put(file.name, file.read_bytes())
    return url


def of_large(steps: int) -> Iterator[Row]:
    """Some steps on 100 GB."""

    def end(progress: Progress) -> None:
        if progress.step >= steps:
            raise KeyboardInterrupt

    with tempfile.TemporaryDirectory() as folder:
        record = RecordReads(Path(folder), MadeUp())
        factory = data.mds("s3://nowhere/large", transform=as_pair)
        _, job = data_job(replace(factory, open_storage=record), width=LARGE_WIDTH)
        with contextlib.suppress(RunInterrupted):
            train_in_threads(job, on_progress=end)
        size = LARGE_SHARDS * LARGE_SAMPLES * (LARGE_WIDTH * 4 + 12)
        yield from rows_of(f"{size / 1e9:.0f} GB", record.reads(), LARGE_SHARDS, size)


def rows_of(name: str, reads: dict[str, Reads], objects: int, size: int) -> Iterator[Row]:
    """A row for each worker."""
    for worker in WORKERS:
        own, other = reads[worker], reads[worker[:-1] + str(1 - int(worker[-1]))]
        yield Row(
            data=name,
            worker=worker,
            objects=len(own.requests),
            of_objects=objects,
            shared=len(own.requests.keys() & other.requests.keys()),
            requests=own.requests.total(),
            read_bytes=own.bytes,
            of_bytes=size,
        )


def show(rows: list[Row]) -> None:
    """The table."""
    print(
        f"{'data':<12}{'worker':<8}{'objects read':>16}{'also by other':>15}{'requests':>10}{'bytes':>14}{'share':>8}"
    )
    for row in rows:
        print(
            f"{row.data:<12}{row.worker:<8}{f'{row.objects} of {row.of_objects}':>16}{row.shared:>15}{row.requests:>10}"
            f"{row.read_bytes:>14,}{row.read_bytes / row.of_bytes:>8.2%}"
        )


if __name__ == "__main__":
    main()
