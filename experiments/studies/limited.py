"""What the functions of `experiments.studies.limits` do. No torch: what it takes would hide what they measure."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from funcpipe.core import MB, ProbeSpec
from funcpipe.platforms.catalog import open_storage

REPEATS = 5
BODY_BYTES = 24_000_000
BUSY_S = 2.0


def fill(probe: ProbeSpec, said: Path) -> None:
    """Use more and more memory; says how much, with the pages of files that its host has read for it."""
    kept = []
    while True:
        kept.append(b"x" * MB)
        said.write_text(str(resident_bytes("self", "RssAnon") + resident_bytes(os.getppid(), "RssFile")))


def resident_bytes(process: int | str, kind: str) -> int:
    (line,) = [line for line in Path(f"/proc/{process}/status").read_text().splitlines() if line.startswith(kind)]
    return int(line.split()[1]) * 1024


def burn(probe: ProbeSpec, said: Path) -> None:
    for _ in range(len(os.sched_getaffinity(0)) - 1):
        if os.fork() == 0:
            spin()
            os._exit(0)
    began_s = time.monotonic()
    spin()
    while True:
        try:
            os.wait()
        except ChildProcessError:
            break
    times = os.times()
    cpu_s = times.user + times.system + times.children_user + times.children_system
    said.write_text(str(cpu_s / (time.monotonic() - began_s)))


def spin() -> None:
    until_s = time.monotonic() + BUSY_S
    while time.monotonic() < until_s:
        pass


def move(probe: ProbeSpec, said: Path) -> None:
    storage, body = open_storage(probe.storage), os.urandom(BODY_BYTES)
    actions: tuple[Callable[[bytes], object], ...] = (
        lambda data: storage.put("body", data),
        lambda data: storage.get("body", stop=len(data)),
    )
    found = []
    for action in actions:
        long_s, short_s = (
            min(seconds(action, data) for _ in range(REPEATS)) for data in (body, body[: BODY_BYTES // 4])
        )
        storage.put("body", body)
        found.append(0.75 * BODY_BYTES / (long_s - short_s))
    said.write_text(json.dumps(found))


def live(probe: ProbeSpec, said: Path) -> None:
    began_s = time.monotonic()
    while True:
        said.write_text(str(time.monotonic() - began_s))
        time.sleep(0.01)


def seconds(action: Callable[[bytes], object], data: bytes) -> float:
    began_s = time.perf_counter()
    action(data)
    return time.perf_counter() - began_s


def entry(payload: str) -> None:
    """What every function runs: the probe is named by its run, and writes to the file beside its storage."""
    told = json.loads(payload)
    name, _, folder = told["run"].partition(":")
    probe = ProbeSpec(**{key: told[key] for key in told if key not in ("format", "layers")})
    {act.__name__: act for act in (fill, burn, move, live)}[name](probe, Path(folder, "said"))
