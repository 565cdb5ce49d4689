"""Measures synchronisation over throttled links in real processes: its speed, what the backward hides, its lanes.

`speed` compares each way with closed forms and the limit: the median time from the common start to the end of the
slowest replica. With ``--wire-sync fp32 bf16`` each is run in both formats; the last column is its time as a share of
that in the first one:

    python -m experiments.studies.sync speed --replicas 4 --megabytes 64 --ways fastest pipelined --wire-sync fp32 bf16

`buckets` measures how much of it hides behind a last backward that takes as long as the gradients need on the downlink,
and completes a round of them after each equal part; the hidden share is relative to the same synchronisation alone.

`lanes` draws three-phase (LambdaML's), pipelined (FuncPipe's) and streamed, the fastest cut with at most 20 puts: the
lanes of every replica, simulated and executed.
"""

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from experiments.studies.sampling import show
from experiments.studies.sync_run import Result, run
from experiments.studies.sync_ways import FASTEST, WAYS, Way, ways
from funcpipe.comm.collectives import Move, open_downloads
from funcpipe.core import SYNC_WIRES, Event, Resource, Streams, Sync, Wire
from funcpipe.partitioner.cost.sync_time import exposed_s, limit_s
from tests.partitioner.sync_links import Links, duration_s, play

UPLOADS = (Move.PUT_SPLIT, Move.PUT_MERGED)
_COLOURS = {"put-split": "tab:blue", "get-split": "tab:cyan", "put-merged": "tab:red", "get-merged": "tab:orange"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    add_speed(verbs.add_parser("speed"))
    add_buckets(verbs.add_parser("buckets"))
    add_lanes(verbs.add_parser("lanes"))
    options = parser.parse_args()
    options.do(options)


def add_speed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--wire-sync", nargs="+", choices=[wire.value for wire in SYNC_WIRES], default=["fp32"])
    parser.add_argument("--store", help="the URL of a real storage, to be measured unthrottled instead")
    parser.add_argument("--mb-per-s", type=float, default=35.0)
    parser.add_argument("--latency-ms", type=float, default=40.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--lanes", type=Path, help="draw the lanes of the last repetitions into this file")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    parser.set_defaults(do=speed)


def add_buckets(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[64])
    parser.add_argument("--rounds", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--mb-per-s", type=float, default=35.0)
    parser.add_argument("--latency-ms", type=float, default=40.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.set_defaults(do=buckets)


def add_lanes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--output", type=Path, default=Path("out/sync_lanes.png"))
    parser.add_argument("--only-simulated", action="store_true")
    parser.set_defaults(do=lanes)


def speed(options: argparse.Namespace) -> None:
    """How fast each way is, beside closed forms and the limit."""
    rate = options.mb_per_s * 1e6
    rows: list[dict[str, object]] = []
    pictures: dict[str, tuple[Event, ...]] = {}
    print(" n   MB  way                   formula s  played s  measured s  measured/formula  measured/limit  by first")
    for replicas in options.replicas:
        links = Links(rate, rate, options.latency_ms / 1e3, open_downloads(replicas))
        for megabytes in options.megabytes:
            asked = (options.ways, replicas, megabytes * 1_000_000, links)
            for same in zip(*(ways(*asked, Wire(wire)) for wire in options.wire_sync), strict=True):
                results = {str(way): run(replace(way, store=options.store), options.repeat) for way in same}
                rows += show_all(same, list(results.values()))
                pictures |= {name: result.events for name, result in results.items()}
    if options.lanes:
        draw(pictures, options.lanes)
    if options.output:
        options.output.write_text(json.dumps(rows, indent=1) + "\n")


def show_all(same: Sequence[Way], results: Sequence[Result]) -> list[dict[str, object]]:
    """Print a line for each format in which a way was measured."""
    rows = [figures(way, result, results[0]) for way, result in zip(same, results, strict=True)]
    for row, result in zip(rows, results, strict=True):
        print(
            f"{row['replicas']:2} {int(str(row['gradient_bytes'])) // 10**6:4}  {row['way']!s:23} "
            f"{row['formula_s']:7.3f} {row['played_s']:9.3f} {row['measured_s']:11.3f} {row['measured/formula']:17.3f} "
            f"{row['measured/limit']:15.3f} {row['measured/first']:9.3f}",
            flush=True,
        )
        if result.places:
            print(show(result.places), flush=True)
    return rows


def figures(way: Way, result: Result, first: Result) -> dict[str, object]:
    """The figures of a way in one format, beside the result in the first one. The limit includes two latencies."""
    measured_s = statistics.median(result.seconds)
    least_s = float(limit_s(way.sent_bytes, way.replicas, way.links.up, way.links.down, way.links.latency_s))
    repeats = len(result.seconds)
    return {
        "way": str(way),
        "replicas": way.replicas,
        "gradient_bytes": way.gradient_bytes,
        "wire": way.wire.value,
        "formula_s": way.formula_s,
        "played_s": math.nan if way.server_bytes_s is not None else duration_s(way.pattern, way.sent_bytes, way.links),
        "measured_s": measured_s,
        "measured/formula": measured_s / way.formula_s,
        "measured/limit": measured_s / least_s,
        "measured/first": measured_s / statistics.median(first.seconds),
        "all_s": result.seconds,
        "cpu_s_each": statistics.mean(result.cpu_s) / repeats,
        "puts_gets_empty_sent_received_each": [statistics.mean(c) / repeats for c in zip(*result.traffic, strict=True)],
    }


def buckets(options: argparse.Namespace) -> None:
    """How much of a synchronisation hides behind the last backward."""
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


def lanes(options: argparse.Namespace) -> None:
    """Draw three ways, simulated and executed."""
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


def draw(ways: Mapping[str, Sequence[Event]], path: Path, *, columns: int = 1) -> None:
    """A bar from each request to the end of its body; requests that are open at once lie over each other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    rows = -(-len(ways) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(5 + 5 * columns, 2.6 * rows), sharex=True, squeeze=False)
    for axis, (name, events) in zip(axes.flat, ways.items(), strict=False):
        first_s = min(event.start_s for event in events)
        replicas = sorted({event.replica for event in events})
        for event in events:
            row = 2 * event.replica + (event.lane is Resource.DOWNLOAD)
            start_s = event.start_s + event.waited_s - first_s
            colour = _COLOURS[event.task.split(".")[0]]
            width_s = event.end_s - event.start_s - event.waited_s
            axis.barh(row, width_s, left=start_s, height=0.8, color=colour, alpha=0.35, edgecolor=colour)
        axis.set_yticks(range(2 * len(replicas)), [f"r{r} {lane}" for r in replicas for lane in ("up", "down")])
        axis.invert_yaxis()
        axis.set_title(f"{name}: {max(event.end_s for event in events) - first_s:.2f} s", loc="left", fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel("seconds")
    figure.legend(
        handles=[Patch(color=colour, label=kind) for kind, colour in _COLOURS.items()], ncols=4, loc="lower center"
    )
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
