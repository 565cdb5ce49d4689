"""Runs of which real processes are killed or stopped at any moment: each must end with the bits of an undisturbed one.

The job is that of `experiments.chaos`, over local functions and files. Functions get SIGKILL, or SIGSTOP until their
lease is over and then SIGCONT; or the client gets SIGKILL, and the run is gone on with under other cuts of the model.
"""

import argparse
import contextlib
import functools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from experiments.chaos import show
from funcpipe import FuncPipe
from funcpipe.client.control import clean
from funcpipe.client.results import RunResult
from funcpipe.core import FaultTolerance, Plan
from funcpipe.errors import FuncPipeError
from funcpipe.platforms.catalog import open_platform, open_storage
from funcpipe.testing import chaos
from funcpipe.testing.chaos import Ending, good
from funcpipe.testing.faults import Fault
from funcpipe.testing.plans import even_stages
from funcpipe.testing.processes import children, functions_of, hosts_of, runs

FAULTS = (Fault.KILL, Fault.SLEEP, Fault.CLIENT)
RUN = "chaos"
EPOCHS = 16
LASTS_S = 4.0
"""About so long does a run last once its functions are started; faults strike within."""

QUICK = FaultTolerance(heartbeat_s=0.25, lease_s=1.0, checkpoint_steps=4)


def slow_loss(output: Tensor, target: Tensor) -> Tensor:
    """The cross entropy, after a while."""
    time.sleep(0.05)
    return nn.functional.cross_entropy(output, target)


def train(url: str, plan: Plan, *, resume: bool = False) -> RunResult:
    pipe = FuncPipe(chaos.model(), loss_fn=slow_loss, optimizer=functools.partial(torch.optim.Adam, lr=0.01))
    return pipe.train(
        chaos.data,
        epochs=EPOCHS,
        plan=plan,
        storage=url,
        faults=QUICK,
        message_deadline_s=chaos.DEADLINE_S / 3,
        run=None if resume else RUN,
        resume=RUN if resume else None,
    )


def run(seed: int, fault: Fault, expected: dict[str, Tensor]) -> Ending:
    """One run, and its ending."""
    draw, began_s = random.Random(seed), time.monotonic()
    folder = Path(tempfile.mkdtemp())
    url, error, restarts, tensors = folder.as_uri(), "", 0, None
    try:
        result = disturbed(url, fault, draw)
        tensors, restarts = result.state_dict(), sum(report.attempt for report in result.workers)
    except FuncPipeError as caught:
        error = f"{type(caught).__name__}: {caught}".splitlines()[0]
        clean(open_storage(url), RUN, open_platform)
    same = tensors is not None and all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    ending = Ending(
        seed=seed,
        fault=fault,
        outcome="same bits" if same else ("OTHER BITS" if tensors is not None else error.partition(":")[0]),
        seconds=time.monotonic() - began_s,
        restarts=restarts,
        error=error,
        left_objects=len(open_storage(url).list("")),
        left_functions=len(hosts_of(os.getpid())) + len(functions_of(os.getpid())),
    )
    shutil.rmtree(folder)
    return ending


def disturbed(url: str, fault: Fault, draw: random.Random) -> RunResult:
    plan = chaos.job().plan
    if fault is Fault.CLIENT:
        kill_client(url, draw)
        return train(url, other_cuts(plan), resume=True)
    victims, after_s = draw.choice((1, 2)), draw.uniform(0, LASTS_S)

    def strike() -> None:
        time.sleep(after_s)
        for function in draw.sample(functions := functions_of(os.getpid()), min(victims, len(functions))):
            with contextlib.suppress(ProcessLookupError):  # it has ended just now
                _hit(function, fault)

    with started_when(lambda: len(functions_of(os.getpid())) >= plan.workers, strike):
        return train(url, plan)


def _hit(function: int, fault: Fault) -> None:
    if fault is Fault.KILL:
        os.kill(function, signal.SIGKILL)
        return
    os.kill(function, signal.SIGSTOP)
    time.sleep(3 * QUICK.lease_s)
    os.kill(function, signal.SIGCONT)


def kill_client(url: str, draw: random.Random) -> None:
    """Another client trains, and is killed at any moment; its functions end with it."""
    client = subprocess.Popen([sys.executable, "-m", "experiments.chaos_processes", "--client", url])
    until_s = time.monotonic() + chaos.DEADLINE_S
    while len(functions_of(client.pid)) < chaos.STAGES * chaos.REPLICAS and time.monotonic() < until_s:
        time.sleep(0.05)
    time.sleep(draw.uniform(0, LASTS_S))
    family = [*hosts_of(client.pid), *functions_of(client.pid), *children(client.pid)]
    client.kill()
    client.wait()
    while any(runs(process) for process in family):
        if time.monotonic() > until_s:
            raise SystemExit(f"processes outlive their client: {[p for p in family if runs(p)]}")
        time.sleep(0.05)


def other_cuts(plan: Plan) -> Plan:
    """The same replicas and micro-batches, and one stage less: the same sums in the same order."""
    names = [layer.name for layer in chaos.job().graph.layers]
    return replace(plan, stages=even_stages(names, chaos.STAGES - 1))


@contextlib.contextmanager
def started_when(ready: Callable[[], bool], strike: Callable[[], None]) -> Iterator[None]:
    """Call `strike` in a thread once it is time, unless the block ends before."""
    ended = threading.Event()

    def watch() -> None:
        while not ready():
            if ended.wait(0.05):
                return
        strike()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--client", metavar="URL", help="only train, with this storage")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.client:
        train(options.client, chaos.job().plan)
        return
    with tempfile.TemporaryDirectory() as folder:
        expected = train(Path(folder).as_uri(), chaos.job().plan).state_dict()
    endings = []
    for seed in range(options.first_seed, options.first_seed + options.runs):
        endings.append(run(seed, FAULTS[seed % len(FAULTS)], expected))
        last = endings[-1]
        how = f"{last.outcome} {last.seconds:5.1f} s, {last.restarts} restarts {last.error}"
        print(f"{seed:4} {last.fault.value:32} {how}", flush=True)
    show(endings)
    if not all(good(ending) for ending in endings):
        raise SystemExit("a run hung, ended with other bits, or left something behind")


if __name__ == "__main__":
    main()
