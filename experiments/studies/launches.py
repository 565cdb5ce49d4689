"""The launch of a run on AWS Lambda, drawn: which functions are invoked, start and wait for the last, and when.

A client invokes up to 32 functions side by side, each invocation takes a while, and `LaunchRate` lets so many begin as
the platform admits. Everything goes by a clock that only waits advance. Each function then has a cold start, and waits
until all have had theirs.

    python -m experiments.studies.launches --functions 384 4096 --figure docs/launches.png
"""

import argparse
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from funcpipe.core import PlatformSpec
from funcpipe.platforms.catalog import load_spec
from funcpipe.platforms.launch_rate import LaunchRate, launched_after_s


@dataclass
class Clock:
    """Time that passes only in waits."""

    now_s: float = 0.0

    def sleep(self, seconds: float) -> None:
        """Let so many seconds pass."""
        self.now_s += seconds


def invoked_s(functions: int, spec: PlatformSpec, *, at_once: int, invocation_s: float) -> list[float]:
    """Return when each function has been invoked, in order."""
    clock = Clock()
    rate = LaunchRate(spec, clock=lambda: clock.now_s, sleep=clock.sleep)
    free_s = [0.0] * min(at_once, functions)  # heap: when the client's threads have time
    found = []
    for _ in range(functions):
        clock.now_s = max(clock.now_s, heapq.heappop(free_s))
        rate.take(1)
        found.append(clock.now_s + invocation_s)
        heapq.heappush(free_s, found[-1])
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--functions", type=int, nargs="+", default=[384, 4096])
    parser.add_argument("--at-once", type=int, default=32, help="invocations that a client makes side by side")
    parser.add_argument("--invocation-s", type=float, default=0.1, help="what an invocation takes")
    parser.add_argument("--figure", type=Path, help="draw into this file (needs matplotlib)")
    options = parser.parse_args(arguments)
    spec = load_spec("aws-lambda")
    launches = {
        functions: invoked_s(functions, spec, at_once=options.at_once, invocation_s=options.invocation_s)
        for functions in options.functions
    }
    print("functions  last is invoked, s  as the rate admits  all compute after  a function waits, mean")
    for functions, found in launches.items():
        waits_s = found[-1] - sum(found) / functions
        admitted_s, _ = launched_after_s(functions, spec)
        print(
            f"{functions:9,}  {found[-1]:18.1f}  {admitted_s:18.1f}  "
            f"{found[-1] + spec.cold_start_s:17.1f}  {waits_s:.1f}"
        )
    if options.figure:
        draw(launches, spec, options.figure)


def draw(launches: dict[int, list[float]], spec: PlatformSpec, path: Path) -> None:
    """Draw, for each launch, the functions that start, wait for the last and compute, over the seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(launches), figsize=(4.2 * len(launches), 3.4), squeeze=False)
    for panel, (functions, found) in zip(panels[0], launches.items(), strict=True):
        counts = range(1, functions + 1)
        started = [seconds + spec.cold_start_s for seconds in found]
        last_s = started[-1]
        panel.fill_betweenx(counts, found, started, step="pre", color="tab:orange", alpha=0.7, label="cold start")
        panel.fill_betweenx(
            counts, started, last_s, step="pre", color="tab:gray", alpha=0.4, label="waits for the last"
        )
        panel.fill_betweenx(counts, last_s, 1.1 * last_s, color="tab:green", alpha=0.6, label="computes")
        admitted = [launched_after_s(count, spec)[0] for count in counts]
        panel.plot(admitted, counts, color="black", linewidth=1, linestyle="--", label="as the rate admits")
        panel.set_xlim(0, 1.1 * last_s)
        panel.set_ylim(0, functions)
        panel.set_xlabel("seconds after the first invocation")
        panel.set_title(f"{functions:,} functions", fontsize=9)
    panels[0][0].set_ylabel("functions, in the order of their start")
    panels[0][-1].legend(fontsize=7, loc="lower right", framealpha=1.0)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main()
