"""Measure a storage from this process: seconds of small requests, bandwidth of large bodies."""

import contextlib
import os
import secrets
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from funcpipe.core import RequestTimes, StorageReport
from funcpipe.errors import KeyMissing
from funcpipe.platforms.base import Storage

REPEATS = 3
_PARTS = 4
_LONG_S = 0.3  # a transfer of this duration gives a reliable bandwidth


def bandwidth(move: Callable[[bytes], object], data: bytes, most: int) -> tuple[float, bytes]:
    """Bytes per second, from the times of a large body and a quarter of it; and that body, of at most `most` bytes.

    The small one gives the time of a request besides its bytes. Disturbances make it longer, so that the shortest
    of its times counts, of many: a longer one would make the bandwidth too large.
    """
    while seconds(partial(move, data)) < _LONG_S and 2 * len(data) <= most:
        data = data + data
    part = data[: len(data) // _PARTS]
    long_s = statistics.median(seconds(partial(move, data)) for _ in range(REPEATS))
    short_s = min(seconds(partial(move, part)) for _ in range(_PARTS * REPEATS))
    return (len(data) - len(part)) / max(long_s - short_s, 1e-9), data


def seconds(do: Callable[[], object]) -> float:
    """Return the seconds that `do` takes."""
    began_s = time.perf_counter()
    do()
    return time.perf_counter() - began_s


REQUESTS = 100
STREAMS, BODY_MB = 4, 64
_FIRST_BYTES = 1 << 20


def measure_storage(storage: Storage, url: str, *, streams: int, body_bytes: int) -> StorageReport:
    """Measure the storage that `url` names with scratch objects, which are deleted again.

    `streams` threads move bodies of at most `body_bytes` each, at once and each its own object; one does so before.
    """
    folder = f"measure-{secrets.token_hex(8)}"
    keys = [f"{folder}/{number}" for number in range(streams)]
    try:
        storage.put(keys[0], b"1")  # which makes the connection
        put, get, empty_get = (
            _times(partial(storage.put, keys[0], b"1")),
            _times(partial(storage.get, keys[0])),
            _times(partial(_get_nothing, storage, f"{folder}/none")),
        )
        alone, together = (_bandwidths(storage, used, body_bytes) for used in (keys[:1], keys))
    finally:
        storage.delete_many(keys)
    return StorageReport(
        storage=url,
        requests=REQUESTS,
        put=put,
        get=get,
        empty_get=empty_get,
        streams=streams,
        body_bytes=body_bytes,
        upload_bytes_s=alone[0],
        download_bytes_s=alone[1],
        upload_together_bytes_s=together[0],
        download_together_bytes_s=together[1],
    )


def _times(request: Callable[[], object]) -> RequestTimes:
    times_s = [seconds(request) for _ in range(REQUESTS)]
    p95_s = statistics.quantiles(times_s, n=20, method="inclusive")[-1]
    return RequestTimes(median_s=statistics.median(times_s), p95_s=p95_s)


def _get_nothing(storage: Storage, key: str) -> None:
    with contextlib.suppress(KeyMissing):
        storage.get(key)


def _bandwidths(storage: Storage, keys: list[str], most: int) -> tuple[float, float]:
    """Return bytes per second up and down, of all `keys` at once together."""
    with ThreadPoolExecutor(len(keys)) as pool:

        def put(body: bytes) -> None:
            list(pool.map(lambda key: storage.put(key, body), keys))

        def get(body: bytes) -> None:
            list(pool.map(lambda key: storage.get(key, stop=len(body)), keys))

        upload_bytes_s, body = bandwidth(put, os.urandom(min(_FIRST_BYTES, most)), most)
        put(body)
        download_bytes_s, _ = bandwidth(get, body, len(body))
    return len(keys) * upload_bytes_s, len(keys) * download_bytes_s
