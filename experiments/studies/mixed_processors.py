"""Kills of real processes that are restarted on another kind of processor: do the replicas of a stage stay equal?

The first attempts compute with all instructions of this machine, later ones with none but the common ones, as on an
older processor (ATEN_CPU_CAPABILITY=default). After each run the hashes of all replicas are compared.
"""

import argparse
import contextlib
import logging
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from experiments.studies.chaos_processes import QUICK, slow_loss
from experiments.studies.process_faults import LASTS_S
from funcpipe.client.launch import launch
from funcpipe.client.prepare import prepare
from funcpipe.client.results import Progress
from funcpipe.client.session import session_on
from funcpipe.client.site import Site, open_local
from funcpipe.core import Invocation, Plan, RunSettings, WorkerSpec
from funcpipe.core.log_lines import RawLine
from funcpipe.errors import FuncPipeError, PlatformError
from funcpipe.model.graph import trace
from funcpipe.platforms.base import Handle, PlainKeys, Platform, Status
from funcpipe.platforms.catalog import open_storage
from funcpipe.runstate.keys import Keys
from funcpipe.testing import chaos
from funcpipe.testing.plans import even_stages
from funcpipe.testing.processes import functions_of

EPOCHS, WIDTH = 16, 160
OLDER = {"ATEN_CPU_CAPABILITY": "default"}


@dataclass
class MixedPlatform(PlainKeys):
    """Starts first attempts on one platform, and later ones on the other."""

    first: Platform
    later: Platform

    def __post_init__(self) -> None:
        self.url, self.spec = self.first.url, self.first.spec

    def check(self, plan: Plan, *, run_s: float | None = None) -> None:
        """As the first platform."""
        self.first.check(plan, run_s=run_s)

    def invoke(self, worker: Invocation) -> Handle:
        """Start a function where its attempt belongs; its name tells where that was."""
        assert isinstance(worker, WorkerSpec), "these functions only train"
        side = "later" if worker.attempt else "first"
        handle = self._side(side).invoke(worker)
        return replace(handle, name=f"{side}/{handle.name}")

    def status(self, handle: Handle) -> Status:
        """The function's state."""
        platform, own = self._place(handle)
        return platform.status(own)

    def stop(self, handle: Handle) -> None:
        """End the function."""
        platform, own = self._place(handle)
        platform.stop(own)

    def detach(self) -> None:
        """Let all functions run on."""
        self.first.detach()
        self.later.detach()

    def logs(self, run: str) -> tuple[RawLine, ...]:
        """What functions have written on this machine."""
        return tuple(self.first.logs(run))

    def open(self, url: str) -> Platform:
        """This platform, by its URL."""
        if url != self.url:
            raise PlatformError(f"there is no platform {url}")
        return self

    def _side(self, side: str) -> Platform:
        return self.later if side == "later" else self.first

    def _place(self, handle: Handle) -> tuple[Platform, Handle]:
        side, _, name = handle.name.partition("/")
        return self._side(side), replace(handle, name=name)


@contextlib.contextmanager
def mixed_platform() -> Iterator[MixedPlatform]:
    """Local functions; later attempts have fewer instructions."""
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(open_local(silent=True))
        before = dict(os.environ)
        os.environ.update(OLDER)
        try:
            later = stack.enter_context(open_local(silent=True))
        finally:
            os.environ.clear()
            os.environ.update(before)
        yield MixedPlatform(first, later)


def model() -> nn.Module:
    """Wide enough that sums differ in their last bits with other instructions."""
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))


class Told(logging.Handler):
    """Counts the differences between replicas that the client has told."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Count it."""
        self.count += "are not those of" in record.getMessage()


def run(seed: int) -> str:
    """Train while one function is killed at a random moment; how that ended."""
    draw, told, endings = random.Random(seed), Told(), []
    graph = trace(model(), (torch.zeros(2, 6),))
    plan = replace(chaos.job().plan, stages=even_stages([layer.name for layer in graph.layers], chaos.STAGES))
    job = replace(
        chaos.job(), graph=graph, plan=plan, epochs=EPOCHS, recipe=replace(chaos.job().recipe, loss=slow_loss)
    )
    logging.getLogger("funcpipe").addHandler(told)
    ended = threading.Event()
    with tempfile.TemporaryDirectory() as folder, mixed_platform() as platform:
        storage = open_storage(Path(folder).as_uri())
        progress: list[int] = []

        def strike() -> None:
            while not progress and not ended.wait(0.05):
                continue
            if not ended.wait(draw.uniform(0, LASTS_S)):
                victims = functions_of(os.getpid())
                with contextlib.suppress(ProcessLookupError, IndexError):
                    os.kill(draw.choice(victims), signal.SIGKILL)

        def note(done: Progress) -> None:
            progress.append(done.step)

        killer = threading.Thread(target=strike)
        killer.start()
        try:
            session = session_on(Site(platform, storage, Path(folder).as_uri()), reopen=platform.open)
            settings = RunSettings(name=chaos.RUN, message_deadline_s=chaos.DEADLINE_S / 3)
            result = launch(prepare(job, session, faults=QUICK, settings=settings), note)
            restarted = {report.instructions for report in result.workers if report.attempt}
            endings.append(f"restarted with {', '.join(sorted(restarted)) or 'nothing'} instructions")
            endings.append("replicas differ at the end: told" if told.count else "replicas equal at the end")
        except FuncPipeError as error:
            endings.append(f"{type(error).__name__}: {error}".splitlines()[0])
        finally:
            ended.set()
            killer.join()
            logging.getLogger("funcpipe").removeHandler(told)
        left = storage.list(Keys(chaos.RUN).run_prefix)
        endings += [f"{len(left)} objects are left"] if left else []
    return "; ".join(endings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    endings: Counter[str] = Counter()
    for seed in range(options.first_seed, options.first_seed + options.runs):
        began_s = time.monotonic()
        ending = run(seed)
        endings[ending] += 1
        print(f"{seed:4} {time.monotonic() - began_s:5.1f} s  {ending}", flush=True)
    for ending, count in endings.most_common():
        print(f"{count:5} {ending}")
    if any("Error" in ending or "left" in ending or "Failed" in ending for ending in endings):
        raise SystemExit("a run failed, or left something behind")


if __name__ == "__main__":
    main()
