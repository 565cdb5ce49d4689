"""Functions that are threads, of which one or two have a fault that is drawn by seed."""

import random
import time
from collections.abc import Callable

from funcpipe.platforms.base import Storage
from funcpipe.platforms.catalog import load_spec
from funcpipe.testing.faults import Fault, FunctionFaults
from funcpipe.testing.thread_platform import ThreadPlatform

REQUESTS = 320
"""About as many storage requests as a worker makes; faults happen before."""

SHORT_DEADLINE_S = 3.0
"""The message deadline of runs in which functions sleep for longer than that."""

_HAND_OVER = ("/checkpoints/", "/hand-overs/", "/functions/", "/leases/", "/progress/")
"""What is written in a hand-over."""


def threads(storage: Storage, fault: Fault, draw: random.Random, *, workers: int) -> ThreadPlatform:
    """A platform on which `fault` happens to one or two of the first functions, those of `workers`."""
    victims = frozenset(draw.sample(range(workers), draw.choice((1, 2))))

    def faults_of(number: int) -> FunctionFaults:
        moment = draw.randrange(1, REQUESTS)
        return _drawn(fault, draw, moment) if number in victims else FunctionFaults()

    return ThreadPlatform(
        load_spec("local"),
        storage,
        faults_of=faults_of,
        lost=victims if fault is Fault.LOST else frozenset(),
        doubled=victims if fault is Fault.TWICE else frozenset(),
        clock_of=lambda number: _clock(draw.uniform(-300, 300) if fault is Fault.SKEW else 0.0),
    )


def _drawn(fault: Fault, draw: random.Random, moment: int) -> FunctionFaults:
    match fault:
        case Fault.KILL | Fault.ORPHAN:
            return FunctionFaults(killed_at=moment)
        case Fault.SLEEP:
            return FunctionFaults(sleeps_at=moment, sleeps_s=draw.uniform(2.0, 4.0))
        case Fault.ZOMBIE:
            return FunctionFaults(sleeps_at=moment // 4 + 1, sleeps_s=draw.uniform(1, 3) * SHORT_DEADLINE_S)
        case Fault.FULL:
            return FunctionFaults(disk_full_from=moment)
        case Fault.SAVING:
            return FunctionFaults(killed_writing=("/checkpoints/", draw.randrange(1, 7)))
        case Fault.HANDING:
            return FunctionFaults(killed_writing=(draw.choice(_HAND_OVER), draw.randrange(1, 3)))
        case Fault.MIXED:
            return _drawn(draw.choice((Fault.KILL, Fault.SLEEP, Fault.FULL, Fault.SAVING)), draw, moment)
        case _:
            return FunctionFaults()


def _clock(offset_s: float) -> Callable[[], float]:
    return lambda: time.time() + offset_s
