"""Races of two `funcpipe` processes for one run, over local functions and files: one is refused, or ended in order.

The second client comes at a random moment after the first: it starts a run of the same name, resumes it, cleans it, or
takes it over. Printed for each race: what became of the second, after how many seconds from its start and from its
first look at the run, and what was left of functions and objects once the run was cleaned.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from funcpipe.core import write
from funcpipe.platforms.catalog import open_storage
from funcpipe.runstate.generations import list_generations
from funcpipe.testing import chaos
from funcpipe.testing.processes import children, functions_of, hosts_of, runs

RUN = "race"
WAIT_S, DELETED_WITHIN_S = 90.0, 10.0
_LOOKED = re.compile(r"another client owns it, as was clear after ([\d.]+) s")
RACES = ("start/start", "start/resume", "resume/resume", "resume/clean", "take-over")
LATEST_S = {"start/start": 1.0, "resume/resume": 1.0}
"""The second client comes within so many seconds after the first; after others, once functions run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """How a race ended; `refusals` counts clients that were refused."""

    kind: str
    refusals: int
    seconds: float
    looked_s: float
    generations: int
    left_functions: int
    left_objects: int
    said: str

    @property
    def good(self) -> bool:
        """Whether one client was refused, or ended by the one that took over, and nothing was left."""
        return self.refusals == 1 and self.generations <= 1 and not self.left_functions and not self.left_objects


class Command:
    """A `funcpipe` process."""

    def __init__(self, *words: str) -> None:
        self.began_s = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "funcpipe", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.seconds = 0.0
        self.said = ""

    def end(self, timeout_s: float = WAIT_S) -> int:
        """Wait for its end; returns its exit code."""
        self.said += self.process.communicate(timeout=timeout_s)[0]
        self.seconds = time.monotonic() - self.began_s
        return self.process.returncode

    @property
    def was_refused(self) -> bool:
        """Whether it has ended because another client owns the run."""
        return self.process.returncode == 2 and "--take-over" in self.said

    def family(self) -> set[int]:
        """Its functions and what starts them."""
        pid = self.process.pid
        return {*hosts_of(pid), *functions_of(pid), *children(pid)}


def race(kind: str, draw: random.Random, folder: Path) -> Race:
    url = (folder / "objects").as_uri()
    plan = folder / "plan.json"
    write(chaos.job().plan, plan)
    words = ["train", "funcpipe.testing.chaos:model", "--plan", str(plan), "--data", "funcpipe.testing.chaos:data"]
    words += [
        "--loss",
        "experiments.studies.chaos_processes:slow_loss",
        "--epochs",
        "200",
        "--checkpoint",
        "4",
        "--quiet",
    ]
    words += ["--storage", url]
    if kind.startswith("resume"):
        stopped = Command(*words, "--run", RUN)
        wait_for_checkpoint(stopped, url)
        stopped.process.send_signal(signal.SIGINT)
        stopped.end()
    first = Command(*words, *(["--resume", RUN] if kind.startswith("resume") else ["--run", RUN]))
    if kind in LATEST_S:
        time.sleep(draw.uniform(0, LATEST_S[kind]))
    else:
        wait_for_functions(first)
        time.sleep(draw.uniform(0, 2))
    seconds: dict[str, list[str]] = {
        "start/start": [*words, "--run", RUN],
        "start/resume": [*words, "--resume", RUN],
        "resume/resume": [*words, "--resume", RUN],
        "resume/clean": ["clean", RUN, "--storage", url],
        "take-over": [*words, "--resume", RUN, "--take-over"],
    }
    second = Command(*seconds[kind])
    family: set[int] = set()
    until_s = time.monotonic() + WAIT_S
    while first.process.poll() is None and second.process.poll() is None and time.monotonic() < until_s:
        family |= first.family() | second.family()
        time.sleep(0.1)
    loser, winner = (first, second) if first.process.poll() is not None else (second, first)
    loser.end()
    wait_for_functions(winner)
    family |= winner.family()
    generations = wait_for_one_generation(url)
    Command("clean", RUN, "--storage", url, "--take-over").end()
    winner.end()
    ended = kind == "take-over" and loser is first and "another client" in loser.said
    return Race(
        kind=kind,
        refusals=int(loser.was_refused or ended) + int(winner.was_refused),
        seconds=loser.seconds if loser is second else time.monotonic() - second.began_s,
        looked_s=max(map(float, _LOOKED.findall(loser.said)), default=0.0),
        generations=generations,
        left_functions=sum(map(runs, family)),
        left_objects=len(open_storage(url).list("")),
        said=" ".join(loser.said.split())[-200:],
    )


def wait_for_functions(client: Command) -> None:
    """Return once all workers of `client` have functions, or it has ended."""
    until_s = time.monotonic() + WAIT_S
    while client.process.poll() is None and time.monotonic() < until_s:
        if len(functions_of(client.process.pid)) >= chaos.STAGES * chaos.REPLICAS:
            return
        time.sleep(0.1)


def wait_for_one_generation(url: str) -> int:
    """How many generations are left of the run, once the one that was resumed had time to be deleted."""
    until_s = time.monotonic() + DELETED_WITHIN_S
    while (count := len(list_generations(open_storage(url), RUN))) > 1 and time.monotonic() < until_s:
        time.sleep(0.1)
    return count


def wait_for_checkpoint(client: Command, url: str) -> None:
    """Return once the run of `client` can be resumed, or it has ended."""
    until_s = time.monotonic() + WAIT_S
    while client.process.poll() is None and time.monotonic() < until_s:
        if any("/checkpoints/" in key for key in open_storage(url).list(f"{RUN}/")):
            return
        time.sleep(0.1)


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # else ignored in a shell's background job
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["FUNCPIPE_LOG"] = "info"  # in which refused clients say how long they have looked
    races = []
    for seed in range(options.first_seed, options.first_seed + options.runs):
        with tempfile.TemporaryDirectory() as folder:
            found = race(RACES[seed % len(RACES)], random.Random(seed), Path(folder))
        races.append(found)
        left = f"{found.left_functions} functions and {found.left_objects} objects left"
        print(
            f"{seed:4} {found.kind:14} {found.refusals} refused or ended, {found.seconds:5.1f} s, "
            f"{found.looked_s:4.1f} s of looking, {found.generations} generations, {left}",
            "" if found.good else found.said,
            flush=True,
        )
    refused = [found for found in races if found.kind != "take-over"]
    slowest_s = max((found.looked_s for found in refused), default=0.0)
    print(f"{sum(found.refusals for found in refused)} of {len(refused)} refused, after {slowest_s:.1f} s at most")
    print(f"orphans: {sum(found.left_functions for found in races)} functions", end=", ")
    print(f"{sum(found.left_objects for found in races)} objects")
    if not all(found.good for found in races):
        raise SystemExit("a client was not refused, or something was left")


if __name__ == "__main__":
    main()
