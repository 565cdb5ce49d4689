"""What `funcpipe optimize` takes in all: processor seconds, start-up included, and memory, for each of 32 plans.

Plans the four models of `experiments/profiles` on AWS Lambda at two batches and four values of time, a command each.
Arguments that this script does not know go to the commands, such as `--numerics bf16`.
"""

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from funcpipe.core import Optimality, Plan, SolverReport, read

PROFILES = Path(__file__).parents[1] / "profiles"
BATCHES, TIME_VALUES = (64, 256), (0.0, 3.84, 30.72, 245.76)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="plan these alone (default: all)")
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds of searching for each plan")
    options, passed_on = parser.parse_known_args()
    profiles = [path for path in sorted(PROFILES.glob("*.json")) if path.stem in options.models or not options.models]
    seconds, peaks_mb, proved = [], [], 0
    print(f"{'model':14} {'batch':>5} {'$/h':>7} {'cpu s':>6} {'MB':>4} {'objective':>13} {'bound':>13} status")
    for path, batch, value in itertools.product(profiles, BATCHES, TIME_VALUES):
        arguments = ["--global-batch", str(batch), "--time-value", str(value), "--time-limit", str(options.time_limit)]
        solved, taken_s, peak_mb = optimize(path, [*arguments, *passed_on])
        seconds.append(taken_s)
        peaks_mb.append(peak_mb)
        proved += solved.status is Optimality.OPTIMAL
        print(
            f"{path.stem:14} {batch:5} {value:7} {taken_s:6.2f} {peak_mb:4.0f} {solved.objective:13.9f} "
            f"{solved.bound:13.9f} {solved.status}",
            flush=True,
        )
    print(
        f"{proved} of {len(seconds)} proved; {median(seconds):.2f} s in the median, {max(seconds):.2f} s at most; "
        f"{max(peaks_mb):.0f} MB at most"
    )


def optimize(profile: Path, arguments: list[str]) -> tuple[SolverReport, float, float]:
    """What the command found for a profile, the processor seconds that it took, and its peak memory in MB."""
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.json"
        command = [sys.executable, "-m", "funcpipe", "optimize", str(profile), "--platform", "aws-lambda"]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        process = subprocess.Popen(
            [*command, *arguments, "--output", str(plan)],
            stdout=subprocess.DEVNULL,
            env=environment | {"OMP_NUM_THREADS": "1"},
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}.")
        solved = read(Plan, plan).solver
        assert solved is not None
        return solved, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


if __name__ == "__main__":
    main()
