"""How fast the way to the storage is: links that are throttled, the codec, what a channel adds.

Rates of the codec are for 64 MB of 32-bit floats on one core, into memory that is used again and into fresh memory; the
channel's overhead is its time for a small object less the storage's own. With ``--store URL`` the storage is measured
too. What waiting costs is measured by `experiments.studies.waiting`.
"""

import argparse
import threading
import time
from collections.abc import Callable
from functools import partial

import torch

from funcpipe.comm import codec
from funcpipe.comm.arrival_estimator import ArrivalEstimator
from funcpipe.comm.channel import Channel
from funcpipe.core import Wire
from funcpipe.platforms.base import Storage
from funcpipe.platforms.catalog import open_storage
from funcpipe.platforms.local.throttle import OwnPace, Throttled
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.run_keys import RUN_KEY

VALUES = 16_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", help="the URL of a storage to measure")
    options = parser.parse_args()
    torch.set_num_threads(1)
    throttle()
    coding()
    overhead()
    if options.store:
        storage(open_storage(options.store))


def throttle() -> None:
    print("throttle: MB/s asked for, moved up and down at once in about a second, in objects of a twentieth")
    for rate in (1e6, 5e6, 35e6, 70e6, 200e6):
        near = MemoryStorage()
        store = Throttled(near, upload=[OwnPace(rate)], download=[OwnPace(rate)])
        near.put("down", body := bytes(int(rate / 20)))
        moved_s = {"up": 0.0, "down": 0.0}

        def move(way: str, request: Callable[[], object], moved_s: dict[str, float] = moved_s) -> None:
            began_s = time.perf_counter()
            for _ in range(20):
                request()
            moved_s[way] = time.perf_counter() - began_s

        def put(store: Throttled = store, body: bytes = body) -> None:
            store.put("up", body)

        def get(store: Throttled = store) -> bytes:
            return store.get("down")

        threads = [threading.Thread(target=move, args=item) for item in (("up", put), ("down", get))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        up, down = (20 * len(body) / moved_s[way] for way in ("up", "down"))
        print(f"  {rate / 1e6:6.0f}  up {up / 1e6:8.2f} ({up / rate:.3f})  down {down / 1e6:8.2f} ({down / rate:.3f})")


def coding() -> None:
    values = torch.randn(VALUES)
    buffer = torch.zeros(4 * VALUES + 4096, dtype=torch.uint8)
    target = {"x": torch.zeros(VALUES)}
    print("codec: GB/s of 32-bit floats")
    for wire in Wire:
        message = bytes(codec.encode({"x": values}, wire))
        ways: dict[str, Callable[[], object]] = {
            "encode": partial(codec.encode, {"x": values}, wire, buffer=buffer),
            "decode": partial(codec.decode, message, into=target),
            "encode into fresh memory": partial(codec.encode, {"x": values}, wire),
            "decode into fresh memory": partial(codec.decode, message),
        }
        rates = ", ".join(f"{name} {values.nbytes / best(way) / 1e9:.2f}" for name, way in ways.items())
        print(f"  {wire.value}: {rates}")


def overhead() -> None:
    store = MemoryStorage()
    channel = Channel(store, ArrivalEstimator(deadline_s=10), run_key=RUN_KEY, cancel=threading.Event())
    small = {"x": torch.randn(64)}
    message = bytes(codec.encode(small))
    put_s = best(lambda: channel.put("k", small), 2000) - best(lambda: store.put("k", message), 2000)
    get_s = best(lambda: channel.get("k"), 2000) - best(lambda: store.get("k"), 2000)
    print(f"channel: adds {put_s * 1e3:.3f} ms to a small put, {get_s * 1e3:.3f} ms to a small get")


def storage(store: Storage) -> None:
    small, large = bytes(100), bytes(64_000_000)
    keys = [f"speed/{i}" for i in range(200)]
    put_s = each(lambda key: store.put(key, small), keys)
    get_s = each(store.get, keys)
    large_put_s = each(lambda key: store.put(key, large), keys[:4])
    large_get_s = each(store.get, keys[:4])
    each(store.delete, keys)
    print(f"storage: small put {put_s * 1e3:.2f} ms, small get {get_s * 1e3:.2f} ms")
    print(
        f"storage: 64 MB put {len(large) / large_put_s / 1e6:.0f} MB/s, get {len(large) / large_get_s / 1e6:.0f} MB/s"
    )


def each(request: Callable[[str], object], keys: list[str]) -> float:
    began_s = time.perf_counter()
    for key in keys:
        request(key)
    return (time.perf_counter() - began_s) / len(keys)


def best(work: Callable[[], object], times: int = 7) -> float:
    found_s = float("inf")
    for _ in range(times):
        began_s = time.perf_counter()
        work()
        found_s = min(found_s, time.perf_counter() - began_s)
    return found_s


if __name__ == "__main__":
    main()
