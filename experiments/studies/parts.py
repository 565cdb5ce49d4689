"""Large objects in one piece or in parts, side by side: where does it pay?

Reads are ranges of one object, writes the parts of a multipart upload. ``--store s3://…`` names a server to measure;
without, links are imposed: one stream fills the link, or it reaches a half or a quarter of it.
"""

import argparse
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from urllib.parse import parse_qsl, urlsplit

import boto3
from botocore.config import Config

from funcpipe.platforms.base import OPEN, Gate, Storage
from funcpipe.platforms.catalog import open_storage
from funcpipe.platforms.local.throttle import OwnPace, Throttled
from funcpipe.platforms.wrappers import StorageWrapper
from funcpipe.testing.memory_storage import MemoryStorage

MB = 1_000_000
PARTS = (1, 2, 4, 8)
LINK_BYTES_S, LATENCY_S = 70e6, 0.04
REPEATS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", help="the URL of a storage that speaks S3")
    parser.add_argument("--megabytes", type=int, nargs="+", default=[64], help="at least 42: parts have 5 MiB")
    options = parser.parse_args()
    print(f"{'':>24} {'MB':>4}  MB/s in " + "".join(f"{parts:>7}" for parts in PARTS) + "  parts")
    for megabytes in options.megabytes:
        body = os.urandom(megabytes * MB)
        if options.store:
            store = open_storage(options.store)
            store.put("parts", body)
            row("get", body, partial(read, store, len(body)))
            row("put", body, partial(write, options.store, body))
            store.delete("parts")
            continue
        for streams in (1, 2, 4):
            far = Streams(MemoryStorage(), LINK_BYTES_S / streams)
            far.put("parts", body)
            row(f"get, {streams} fill the link", body, partial(read, far, len(body)))


def row(name: str, body: bytes, move: Callable[[int], None]) -> None:
    rates = [f"{len(body) / min(seconds(move, parts) for _ in range(REPEATS)) / MB:7.0f}" for parts in PARTS]
    print(f"{name:>24} {len(body) // MB:4}          " + "".join(rates), flush=True)


def seconds(move: Callable[[int], None], parts: int) -> float:
    began_s = time.perf_counter()
    move(parts)
    return time.perf_counter() - began_s


def read(store: Storage, size: int, parts: int) -> None:
    """The object, into one buffer."""
    if parts == 1:
        assert len(store.get("parts")) == size
        return
    whole = bytearray(size)

    def read_part(number: int) -> None:
        start, stop = bounds(size, parts, number)
        whole[start:stop] = store.get("parts", start=start, stop=stop)

    with ThreadPoolExecutor(parts) as pool:
        list(pool.map(read_part, range(parts)))


def write(url: str, body: bytes, parts: int) -> None:
    """The object, by one put or a multipart upload."""
    found = urlsplit(url)
    client = boto3.session.Session().client(
        "s3",
        endpoint_url=dict(parse_qsl(found.query)).get("endpoint"),
        region_name="us-east-1",
        config=Config(request_checksum_calculation="when_required", s3={"addressing_style": "path"}),
    )
    place = {"Bucket": found.netloc, "Key": f"{found.path.strip('/')}/written"}
    if parts == 1:
        client.put_object(**place, Body=body)
        return
    upload = {**place, "UploadId": client.create_multipart_upload(**place)["UploadId"]}

    def write_part(number: int) -> dict[str, object]:
        start, stop = bounds(len(body), parts, number)
        done = client.upload_part(**upload, PartNumber=number + 1, Body=memoryview(body)[start:stop].tobytes())
        return {"PartNumber": number + 1, "ETag": done["ETag"]}

    with ThreadPoolExecutor(parts) as pool:
        written = list(pool.map(write_part, range(parts)))
    client.complete_multipart_upload(**upload, MultipartUpload={"Parts": written})


def bounds(size: int, parts: int, number: int) -> tuple[int, int]:
    return size * number // parts, size * (number + 1) // parts


class Streams(StorageWrapper):
    """A link that all requests share, each of which reaches no more than `stream_bytes_s`."""

    def __init__(self, near: Storage, stream_bytes_s: float) -> None:
        super().__init__(near)
        self.watches = False
        self._stream_bytes_s = stream_bytes_s
        self._link = OwnPace(LINK_BYTES_S)

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        own = Throttled(self._store, latency_s=LATENCY_S, download=[self._link, OwnPace(self._stream_bytes_s)])
        return own.get(key, start=start, stop=stop, gate=gate)


if __name__ == "__main__":
    main()
