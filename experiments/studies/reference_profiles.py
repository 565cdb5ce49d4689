"""Measure the four reference models for AWS Lambda, as anybody would: by the command, in a process each.

Writes a profile of each to experiments/profiles; prints what measuring took. Seconds are those of one processor here,
divided by the vCPUs of each size (the profiles say that they are estimated).
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "profiles"
MICRO_BATCH = 4
MODELS = {
    "resnet101": "resnet:model",
    "amoebanet-d18": "amoebanet:model",
    "amoebanet-d36": "amoebanet:model_36",
    "bert-large": "bert:model",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    print(f"{'model':16} {'seconds':>8} {'peak MB':>8}", flush=True)
    for name in options.only:
        seconds, peak_bytes = measure(name)
        print(f"{name:16} {seconds:8.1f} {peak_bytes / 2**20:8.0f}", flush=True)


def measure(name: str) -> tuple[float, int]:
    """Seconds and peak resident bytes of `funcpipe profile`."""
    file, _, factory = MODELS[name].partition(":")
    module = f"experiments.models.{file}"
    words = ["profile", f"{module}:{factory}", "--sample", f"{module}:sample", "--micro-batch", str(MICRO_BATCH)]
    command = [sys.executable, "-m", "funcpipe", *words, "--platform", "aws-lambda", "-o", str(FOLDER / f"{name}.json")]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        raise SystemExit(f"{' '.join(command)} ended with status {os.waitstatus_to_exitcode(status)}")
    return time.perf_counter() - start, usage.ru_maxrss * 1024


if __name__ == "__main__":
    main()
