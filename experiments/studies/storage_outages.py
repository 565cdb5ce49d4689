"""Runs whose storage is out of order for up to a minute: read-only, full, broken, or busy. How many survive?

A small job of 3 stages x 2 replicas is trained over functions that are threads. Its objects are files, and their disk
fails as a real one does; or they are in memory, and requests are refused as S3 refuses them. `--seconds` is the longest
outage; heartbeats, leases and the message deadline are in proportion to it as by default to a minute.
"""

import argparse
import errno
import os
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from funcpipe.client.launch import launch
from funcpipe.client.prepare import prepare
from funcpipe.client.results import Progress
from funcpipe.client.session import session_on
from funcpipe.client.site import Site
from funcpipe.core import FaultTolerance, RunSettings
from funcpipe.errors import FuncPipeError
from funcpipe.platforms.base import Storage
from funcpipe.platforms.catalog import load_spec
from funcpipe.platforms.local.files import FileStorage
from funcpipe.platforms.wrappers import Retried
from funcpipe.testing.chaos import job
from funcpipe.testing.faulty_storage import FaultyStorage, StorageFaults
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform

MINUTE_S = 60.0
EPOCHS = 6


class Kind(Enum):
    """What happens: the error's number, and the work that it hits."""

    READ_ONLY = (errno.EROFS, ("write", "remove"))
    FULL = (errno.ENOSPC, ("write",))
    BROKEN = (errno.EIO, ("read", "write", "remove", "list"))
    STALE = (errno.ESTALE, ("read", "list"))
    BUSY = (0, ())


class FailingDisk(FileStorage):
    """Files on a disk on which some kinds of work fail with `number` while it is set."""

    number = 0
    works: tuple[str, ...] = ()

    @contextmanager
    def _errors_of(self, work: str, path: str) -> Iterator[None]:
        with super()._errors_of(work, path):
            if self.number and work in self.works:
                raise OSError(self.number, os.strerror(self.number))
            yield


class Switched(FaultyStorage):
    """Refuses all requests while `refuses` is set."""

    refuses = False

    def _happens(self, name: str) -> bool:
        return name == "refused" and self.refuses


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run with an outage ended."""

    kind: Kind
    outage_s: float
    seconds: float
    functions: int
    left: int
    outcome: str


def run(
    kind: Kind, outage_s: float, scale: float, seed: int, expected: dict[str, Tensor] | None
) -> tuple[Ending, dict[str, Tensor]]:
    """Train with an outage in the midst of it."""
    draw, began_s = random.Random(seed), time.monotonic()
    faults = FaultTolerance(heartbeat_s=10 * scale, lease_s=10 * scale, start_s=60 * scale, checkpoint_steps=2)
    work = replace(job(), epochs=EPOCHS, message_deadline_s=max(300 * scale, 10.0))
    begins_at, over = draw.randrange(1, EPOCHS * 3 - 1), threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        disk, memory = FailingDisk(folder), Switched(MemoryStorage(), StorageFaults())
        bare: Storage = memory if kind is Kind.BUSY else disk
        storage = Retried(bare, deadline_s=work.message_deadline_s)
        platform = ThreadPlatform(load_spec("local"), bare)

        def disturb() -> None:
            memory.refuses, disk.works, disk.number = True, kind.value[1], kind.value[0]
            over.wait(outage_s)
            memory.refuses, disk.number = False, 0

        trouble = threading.Thread(target=disturb)

        def on_progress(progress: Progress) -> None:
            if progress.step == begins_at and outage_s:
                trouble.start()

        outcome, functions, tensors = "survived", 0, {}
        try:
            session = session_on(Site(platform, storage, "memory://here"), reopen=platform.open)
            result = launch(prepare(work, session, faults=faults, settings=RunSettings(name="outage")), on_progress)
            tensors, functions = result.state_dict(), result.bill.functions
            if expected is not None and not all(torch.equal(tensors[name], expected[name]) for name in expected):
                outcome = "OTHER BITS"
        except FuncPipeError as error:
            outcome = f"ended: {type(error).__name__}: {str(error).splitlines()[0]}"
        finally:
            over.set()
            if trouble.ident is not None:
                trouble.join()
            platform.stop_all()
        left = len(bare.list(""))
    return Ending(kind, outage_s, time.monotonic() - began_s, functions, left, outcome), tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=MINUTE_S, help="the longest outage")
    options = parser.parse_args()
    torch.set_num_threads(1)
    scale = options.seconds / MINUTE_S
    _, expected = run(Kind.BUSY, 0.0, scale, 0, None)
    endings = []
    for seed in range(options.first_seed, options.first_seed + options.runs):
        kind = list(Kind)[seed % len(Kind)]
        outage_s = random.Random(seed).uniform(0.15, 1.0) * options.seconds
        ending, _ = run(kind, outage_s, scale, seed, expected)
        endings.append(ending)
        print(
            f"seed {seed:>3} {kind.name:>10}: out of order for {outage_s:5.1f} s, {ending.seconds:5.1f} s in all, "
            f"{ending.functions} functions, {ending.left} objects left: {ending.outcome}",
            flush=True,
        )
    counts = Counter(ending.outcome.partition(":")[0] for ending in endings)
    print(
        f"{len(endings)} outages of up to {options.seconds:g} s: "
        + ", ".join(f"{n} {name}" for name, n in counts.items())
    )
    if counts["survived"] < len(endings) or any(ending.left for ending in endings):
        raise SystemExit("a run did not survive, or left something behind")


if __name__ == "__main__":
    main()
