"""A sweep over local functions whose client tells how far it is: `python -m tests.sweep.killed_sweep STORAGE`."""

import sys

from funcpipe.sweep.study import SweepStatus
from tests.sweep.small_sweeps import STEADY, sweep

TRIALS, EPOCHS = 3, 25


def told(status: SweepStatus) -> None:
    print(status.counts.get("finished", 0), flush=True)


if __name__ == "__main__":
    sweep(epochs=EPOCHS).run(TRIALS, run="digits", storage=sys.argv[1], max_functions=1, faults=STEADY, show=told)
