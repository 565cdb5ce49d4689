"""What becomes of many composed jobs, by cause: ``python -m tests.jobs.count --jobs 1000 --seed 1``."""

import argparse
import collections
import contextlib
import dataclasses
import logging
import random

import torch

from funcpipe.runstate.keys import Keys
from funcpipe.runstate.signing import KeyFolder
from tests.jobs.composed import Job, drawn, outcome
from tests.support.run_keys import NONCE, RUN_KEY, remembered_keys


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    draw, counts = random.Random(options.seed), collections.Counter[str]()
    stack = contextlib.ExitStack()
    stack.enter_context(remembered_keys())
    KeyFolder().keep(Keys("run-1", 0, NONCE), RUN_KEY)
    for _ in range(options.jobs):
        job = drawn(draw)
        try:
            found = outcome(job)
        except Exception as error:  # noqa: BLE001 - what is counted
            found = f"{type(error).__name__.upper()}: {str(error)[:80]}"
            default = Job()
            parts = {name: value for name, value in dataclasses.asdict(job).items() if value != getattr(default, name)}
            print(parts, found, flush=True)
        counts[" ".join(found.split()[:9])] += 1
    for cause, count in counts.most_common():
        print(f"{count:5} {cause}")


if __name__ == "__main__":
    main()
