"""Runs in which functions sleep for one to three message deadlines at random operations: none may end because of them.

A function that wakes up has been replaced, and finds its messages late, its lease lost and its step over. Whatever it
then says, the run must end with the bits of an undisturbed one. Functions are threads; deadlines are short.
"""

import argparse
import random
import time
from collections import Counter
from dataclasses import replace

import torch
from torch import Tensor, nn

from funcpipe.client.launch import launch
from funcpipe.client.prepare import prepare
from funcpipe.client.results import RunResult
from funcpipe.client.session import session_on
from funcpipe.client.site import Site
from funcpipe.core import FaultTolerance, RunSettings
from funcpipe.errors import FuncPipeError
from funcpipe.platforms.catalog import load_spec
from funcpipe.platforms.wrappers import Retried
from funcpipe.testing import chaos
from funcpipe.testing.faults import FunctionFaults
from funcpipe.testing.faulty_threads import REQUESTS
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform

DEADLINE_S = 4.0
EPOCHS = 24
FAULTS = FaultTolerance(heartbeat_s=0.2, lease_s=1.0, start_s=2.0, checkpoint_steps=4)
WORKERS = chaos.STAGES * chaos.REPLICAS


def slow_loss(output: Tensor, target: Tensor) -> Tensor:
    """The cross entropy, after a while, so that sleepers wake up before the run has ended."""
    time.sleep(0.05)
    return nn.functional.cross_entropy(output, target)


def sleepers(seed: int, storage: MemoryStorage) -> ThreadPlatform:
    """Functions of which one or two of the first fall asleep."""
    draw = random.Random(seed)
    victims = draw.sample(range(WORKERS), draw.choice((1, 2)))
    moments = {victim: (draw.randrange(1, REQUESTS), draw.uniform(1, 3) * DEADLINE_S) for victim in victims}

    def faults_of(number: int) -> FunctionFaults:
        if seed < 0 or number not in moments:
            return FunctionFaults()
        sleeps_at, sleeps_s = moments[number]
        return FunctionFaults(sleeps_at=sleeps_at, sleeps_s=sleeps_s)

    return ThreadPlatform(load_spec("local"), storage, faults_of=faults_of)


def train(platform: ThreadPlatform, storage: MemoryStorage) -> RunResult:
    """Train on `platform`; returns once no function runs any more."""
    job = replace(
        chaos.job(), epochs=EPOCHS, recipe=replace(chaos.job().recipe, loss=slow_loss), message_deadline_s=DEADLINE_S
    )
    session = session_on(Site(platform, Retried(storage), "memory://here"), reopen=platform.open)
    try:
        return launch(prepare(job, session, faults=FAULTS, settings=RunSettings(name=chaos.RUN)))
    finally:
        platform.stop_all()


def run(seed: int, expected: dict[str, Tensor] | None) -> tuple[str, dict[str, Tensor] | None]:
    """How a run ended, and what it has learned."""
    storage = MemoryStorage()
    try:
        found = train(sleepers(seed, storage), storage).state_dict()
    except FuncPipeError as error:
        return f"{type(error).__name__}: {error}".splitlines()[0], None
    left = len(storage.list(""))
    if left:
        return f"{left} objects are left", found
    same = expected is None or all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    return "same bits" if same else "OTHER BITS", found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ending, expected = run(-1, None)
    assert expected is not None, ending
    endings: Counter[str] = Counter()
    for seed in range(options.first_seed, options.first_seed + options.runs):
        began_s = time.monotonic()
        ending, _ = run(seed, expected)
        endings[ending] += 1
        print(f"{seed:4} {time.monotonic() - began_s:5.1f} s  {ending}", flush=True)
    for ending, count in endings.most_common():
        print(f"{count:5} {ending}")
    if set(endings) != {"same bits"}:
        raise SystemExit("a run was ended by an attempt that had been superseded, or went wrong")


if __name__ == "__main__":
    main()
