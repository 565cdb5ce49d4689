"""How much of a synchronisation hides behind the last backward, in real processes over throttled links.

The backward takes as long as the gradients need on the downlink, and completes a round of them after each equal part.
The hidden share is relative to the time that the same synchronisation takes alone, in the same run.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace

from experiments.studies.sync_speed import run
from experiments.studies.sync_ways import Way
from funcpipe.comm.collectives import open_downloads
from funcpipe.core import Streams, Sync
from funcpipe.partitioner.cost.sync_time import exposed_s
from tests.partitioner.sync_links import Links


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[64])
    parser.add_argument("--rounds", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--mb-per-s", type=float, default=35.0)
    parser.add_argument("--latency-ms", type=float, default=40.0)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    rate = options.mb_per_s * 1e6
    print(" n   MB  way               backward s  alone s  exposed s  by formula s  hidden")
    for replicas in options.replicas:
        links = Links(rate, rate, options.latency_ms / 1e3, open_downloads(replicas))
        for megabytes in options.megabytes:
            for rounds in options.rounds:
                row(way_of(replicas, megabytes * 1_000_000, rounds, links), options.repeat)


def way_of(replicas: int, gradient_bytes: int, rounds: int, links: Links) -> Way:
    """An exchange between two; else streams with an object for each reader and as many merged ones as rounds."""
    if replicas == 2:
        return Way(Sync.EXCHANGE, Streams(rounds, 1, 1), replicas, gradient_bytes, links)
    return Way(Sync.STREAMED, Streams(rounds, replicas - 1, rounds), replicas, gradient_bytes, links)


def row(way: Way, repeat: int) -> None:
    """Measure and print one line."""
    n, size = way.replicas, way.gradient_bytes
    backward_s = 2 * (n - 1) / n * size / way.links.down
    alone_s = statistics.median(run(way, repeat).seconds)
    exposed = statistics.median(after(run(replace(way, backward_s=backward_s), repeat).seconds, backward_s))
    assert way.streams is not None
    links = (way.links.up, way.links.down, way.links.latency_s)
    form_s = float(exposed_s(way.sync, size, n, *links, way.streams, backward_s))
    print(
        f"{n:2} {size // 10**6:4}  {way!s:16} {backward_s:11.3f} {alone_s:8.3f} {exposed:10.3f} {form_s:13.3f} "
        f"{1 - exposed / alone_s:7.0%}",
        flush=True,
    )


def after(seconds: Sequence[float], backward_s: float) -> list[float]:
    """What is left of each when the backward has ended."""
    return [one - backward_s for one in seconds]


if __name__ == "__main__":
    main()
