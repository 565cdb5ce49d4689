"""Does a storage keep what runs rely on? Conditional puts, reads and lists after writes, ranges, deletions, in races.

    python -m experiments.studies.storage_conformance "s3://bucket/prefix?endpoint=http://127.0.0.1:7480" --make-bucket
    python -m experiments.studies.storage_conformance "redis://127.0.0.1:6379/0?prefix=tried"

Each client has connections of its own. A violation is printed with what was expected; leases need the first check, and
`docs/storage.md` says which servers pass.
"""

import argparse
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import parse_qs, urlsplit

from funcpipe.errors import InputError, KeyExists, KeyMissing
from funcpipe.platforms.base import Storage
from funcpipe.platforms.catalog import open_storage
from funcpipe.platforms.wrappers import Retried

WRITERS = 32
LISTED = 1_200
"""More than one page of a list, and more than one batch of a deletion."""


@dataclass
class Clients:
    """As many clients of one storage as there are `stores`, which work at the same moment."""

    stores: Sequence[Storage]
    draw: random.Random
    violations: list[str] = field(default_factory=list)

    def together(self, works: Iterable[Callable[[Storage], object]]) -> list[object]:
        """What each of `works` returns; one client does each, and all begin at once."""
        tasks = list(works)
        start = threading.Barrier(len(tasks))

        def begin(work: Callable[[Storage], object], store: Storage) -> object:
            start.wait()
            return work(store)

        with ThreadPoolExecutor(len(tasks)) as pool:
            return list(pool.map(begin, tasks, self.stores))

    def expect(self, found: object, expected: object, what: str) -> None:
        """Note a violation if `found` is not what is `expected`."""
        if found != expected:
            self.violations.append(f"{what}: expected {expected!r:.80}, found {found!r:.80}")


def one_writer_wins(clients: Clients, number: int) -> None:
    key = f"lease/{number}"

    def put(writer: int, store: Storage) -> int | None:
        try:
            store.put(key, str(writer).encode(), if_absent=True)
        except KeyExists:
            return None
        return writer

    won = [writer for writer in clients.together(partial(put, n) for n in range(WRITERS)) if writer is not None]
    clients.expect(len(won), 1, f"conditional puts of {key} that succeeded")
    if len(won) == 1:
        clients.expect(clients.stores[0].get(key), str(won[0]).encode(), f"what the one that won has put as {key}")


def refused_puts_change_nothing(clients: Clients, number: int) -> None:
    key, body = f"kept/{number}", _body(clients, 50_000)
    clients.stores[0].put(key, body)

    def refused(store: Storage) -> bool:
        try:
            store.put(key, b"another", if_absent=True)
        except KeyExists:
            return True
        return False

    for done in clients.together([refused] * 4):
        clients.expect(done, True, f"whether a conditional put of {key} is refused")
    clients.expect(clients.stores[-1].get(key), body, f"{key} after conditional puts that were refused")


def reads_see_what_was_written(clients: Clients, number: int) -> None:
    """Also where another client has found nothing just before, and where an object is replaced or deleted."""
    writer, reader = clients.draw.sample(list(clients.stores), 2)
    key = f"read/{number}"
    clients.expect(_got(reader, key), None, f"{key} before it was put")
    for body in (_body(clients, 1000), _body(clients, 10)):
        writer.put(key, body)
        clients.expect(_got(reader, key), body, f"{key} after its put")
    writer.delete(key)
    clients.expect(_got(reader, key), None, f"{key} after its deletion")


def lists_see_what_was_written(clients: Clients, number: int) -> None:
    writer, reader = clients.draw.sample(list(clients.stores), 2)
    prefix = f"list/{number}/"
    for count in range(1, 4):
        writer.put(f"{prefix}{count}", b"")
        clients.expect(len(reader.list(prefix)), count, f"objects listed as {prefix} after {count} puts")
    writer.delete_many([f"{prefix}1", f"{prefix}3", f"{prefix}never"])
    clients.expect(reader.list(prefix), (f"{prefix}2",), f"{prefix} after a deletion")


def long_lists_are_whole(clients: Clients, number: int) -> None:
    prefix, share = f"long/{number}/", LISTED // WRITERS

    def put(writer: int, store: Storage) -> None:
        for each in range(share):
            store.put(f"{prefix}{writer * share + each:06d}", b"")

    clients.together(partial(put, n) for n in range(WRITERS))
    keys = tuple(f"{prefix}{each:06d}" for each in range(WRITERS * share))
    clients.expect(clients.stores[0].list(prefix), keys, f"objects listed as {prefix}")
    clients.stores[1].delete_many(keys)
    clients.expect(clients.stores[2].list(prefix), (), f"objects listed as {prefix} after all were deleted")


def ranges_are_slices(clients: Clients, number: int) -> None:
    writer, reader = clients.draw.sample(list(clients.stores), 2)
    key, body = f"range/{number}", _body(clients, clients.draw.choice([1, 1000, 3_000_000]))
    writer.put(key, body)
    for _ in range(5):
        start, stop = sorted(clients.draw.choices(range(len(body) + 10), k=2))
        clients.expect(reader.get(key, start=start, stop=stop), body[start:stop], f"bytes {start} to {stop} of {key}")
        clients.expect(reader.get(key, start=start), body[start:], f"bytes of {key} from {start} on")


def readers_see_whole_objects(clients: Clients, number: int) -> None:
    key = f"whole/{number}"
    bodies = [bytes([value]) * 1_000_000 for value in range(3)]
    clients.stores[0].put(key, bodies[0])

    def write(store: Storage) -> None:
        for body in bodies * 2:
            store.put(key, body)

    def read(store: Storage) -> bool:
        return all(store.get(key) in bodies for _ in range(6))

    for whole in clients.together([write, write, *[read] * 6])[2:]:
        clients.expect(whole, True, f"whether all that was read of {key} is one of what was put")


CHECKS: dict[Callable[[Clients, int], None], int] = {
    one_writer_wins: 10,
    refused_puts_change_nothing: 5,
    reads_see_what_was_written: 20,
    lists_see_what_was_written: 20,
    long_lists_are_whole: 1,
    ranges_are_slices: 10,
    readers_see_whole_objects: 2,
}
"""How often each check is made for each of `--rounds`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="an empty storage, as for --storage")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--make-bucket", action="store_true", help="make the bucket first")
    options = parser.parse_args()
    if options.make_bucket:
        _make_bucket(options.url)
    stores = [Retried(open_storage(options.url)) for _ in range(WRITERS)]
    if stores[0].list(""):
        raise SystemExit(f"{options.url} is not empty; give another prefix")
    broken = 0
    print(f"{'check':32} {'trials':>6} {'violations':>10}")
    for check, times in CHECKS.items():
        clients = Clients(stores, random.Random(options.seed))
        for number in range(times * options.rounds):
            check(clients, number)
        stores[0].delete_many(stores[0].list(""))
        print(
            f"{check.__name__.replace('_', ' '):32} {times * options.rounds:>6} {len(clients.violations):>10}",
            flush=True,
        )
        for violation in clients.violations[:3]:
            print(f"    {violation}", flush=True)
        broken += len(clients.violations)
    if broken:
        raise SystemExit("runs cannot rely on this storage")


def _make_bucket(url: str) -> None:
    import boto3  # which other storages do without

    split = urlsplit(url)
    if split.scheme != "s3":
        raise InputError(f"--make-bucket makes buckets of S3, and {url} is none; leave it out")
    options = {name: values[-1] for name, values in parse_qs(split.query).items()}
    client = boto3.client("s3", endpoint_url=options.get("endpoint"), region_name=options.get("region", "us-east-1"))
    client.create_bucket(Bucket=split.netloc)


def _body(clients: Clients, length: int) -> bytes:
    return clients.draw.randbytes(length)


def _got(store: Storage, key: str) -> bytes | None:
    try:
        return store.get(key)
    except KeyMissing:
        return None


if __name__ == "__main__":
    main()
