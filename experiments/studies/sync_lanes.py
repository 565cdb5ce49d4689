"""Draws three algorithms of synchronisation: the lanes of every replica, simulated and executed.

Three-phase is LambdaML's, pipelined is FuncPipe's; streamed is the fastest cut with at most 20 puts. They are executed
in real processes over throttled links, with every byte.
"""

import argparse
from pathlib import Path

from experiments.studies.sync_picture import draw
from experiments.studies.sync_speed import run
from experiments.studies.sync_ways import FASTEST, Way, ways
from funcpipe.comm.collectives import Move, open_downloads
from funcpipe.core import Event, Resource, Sync
from tests.partitioner.sync_links import Links, play

UPLOADS = (Move.PUT_SPLIT, Move.PUT_MERGED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--output", type=Path, default=Path("out/sync_lanes.png"))
    parser.add_argument("--only-simulated", action="store_true")
    options = parser.parse_args()
    links = Links(35e6, 35e6, 0.04, open_downloads(options.replicas))
    names = (Sync.THREE_PHASE.value, Sync.PIPELINED.value, FASTEST)
    pictures = {}
    for way in ways(names, options.replicas, options.megabytes * 1_000_000, links):
        pictures[f"{way}, simulated"] = simulated(way)
        if not options.only_simulated:
            pictures[f"{way}, executed"] = run(way, 1).events
    for name, events in pictures.items():
        print(f"{name:32} {max(e.end_s for e in events) - min(e.start_s for e in events):.3f} s")
    draw(pictures, options.output, columns=1 if options.only_simulated else 2)
    print(f"written: {options.output}")


def simulated(way: Way) -> tuple[Event, ...]:
    """From each request to the end of its body."""
    return tuple(
        Event(
            task=moved.transfer.move.value,
            stage=0,
            replica=moved.replica,
            lane=Resource.UPLOAD if moved.transfer.move in UPLOADS else Resource.DOWNLOAD,
            step=0,
            start_s=moved.asked_s,
            end_s=moved.ended_s,
        )
        for moved in play(way.pattern, way.gradient_bytes, way.links)
    )


if __name__ == "__main__":
    main()
