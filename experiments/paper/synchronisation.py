"""How much faster is the pipelined scatter-reduce than the three-phase one, by workers and by size?

Simulated: every transfer of all workers, on links of 70 MB/s with 40 ms for a request. Executed: processes that sum
real vectors through files, on links of 20 MB/s, beside the simulation of such links.
"""

import itertools
from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING

from experiments.paper.common import How, Result, Row, Script, Settings, new_figure, percent, run
from experiments.studies.sync import Way
from experiments.studies.sync import run as execute
from funcpipe.comm.collectives import pattern
from funcpipe.core import Sync
from funcpipe.core.choices import OPEN_UPLOADS, open_downloads
from tests.partitioner.sync_links import Links, duration_s

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LINK_MB_S, LATENCY_S = 70, 0.04
EXECUTED_LINK_MB_S = 20  # so slow that two processors hardly delay eight workers
WORKERS = (2, 4, 8, 16, 32)
MEGABYTES = (4, 16, 64, 256, 1024)
EXECUTED = ((2, 16), (4, 16), (8, 16))
REPEATS = 2
SYNCS = (Sync.THREE_PHASE, Sync.PIPELINED)


def measure(settings: Settings) -> Result:
    rows = [row for n, size in itertools.product(WORKERS, MEGABYTES) for row in simulated_rows(n, size)]
    if settings.execute:
        rows += [row for n, size in EXECUTED for row in executed_rows(n, size)]
    how = How.BOTH if settings.execute else How.SIMULATED
    place = (
        f"separate links of {LINK_MB_S} MB/s and 40 ms; executed: processes of this machine, {EXECUTED_LINK_MB_S} MB/s"
    )
    return Result(how=how, on=place, rows=tuple(rows), findings=findings(rows), figure=draw(rows))


def _links(workers: int, link_mb_s: int) -> Links:
    return Links(link_mb_s * 1e6, link_mb_s * 1e6, LATENCY_S, OPEN_UPLOADS, open_downloads(workers))


def played(workers: int, megabytes: int, sync: Sync, link_mb_s: int) -> float:
    """Simulated seconds."""
    return duration_s(pattern(sync, workers, None), megabytes * 1e6, _links(workers, link_mb_s))


def simulated_rows(workers: int, megabytes: int) -> Iterator[Row]:
    for sync in SYNCS:
        row = {"workers": workers, "MB": megabytes, "sync": sync.value, "link_MB_s": LINK_MB_S, "executed_s": None}
        yield {**row, "simulated_s": played(workers, megabytes, sync, LINK_MB_S)}


def executed_rows(workers: int, megabytes: int) -> Iterator[Row]:
    """The same with slower links, and the median of some executions beside it."""
    for sync in SYNCS:
        links = _links(workers, EXECUTED_LINK_MB_S)
        found = execute(Way(sync, None, workers, megabytes * 1_000_000, links), REPEATS)
        row = {"workers": workers, "MB": megabytes, "sync": sync.value, "link_MB_s": EXECUTED_LINK_MB_S}
        simulated_s = played(workers, megabytes, sync, EXECUTED_LINK_MB_S)
        yield {**row, "simulated_s": simulated_s, "executed_s": median(found.seconds)}


def gains(rows: Sequence[Row], column: str) -> dict[tuple[int, int], float]:
    """By workers and size: what share of the three-phase time the pipelined way saves; negative where it is slower.

    `column` is simulated_s, of the faster links, or executed_s.
    """
    links = LINK_MB_S if column == "simulated_s" else EXECUTED_LINK_MB_S
    found = {(r["workers"], r["MB"], r["sync"]): r[column] for r in rows if r["link_MB_s"] == links}
    places = {(n, size) for n, size, _ in found}
    three, pipelined = (sync.value for sync in SYNCS)
    return {place: 1 - found[*place, pipelined] / found[*place, three] for place in sorted(places)}


def findings(rows: Sequence[Row]) -> tuple[str, ...]:
    simulated, real = gains(rows, "simulated_s"), gains(rows, "executed_s")
    slower = [f"{n} workers with {size} MB" for (n, size), gain in simulated.items() if gain < 0]
    top = max(simulated, key=lambda key: simulated[key])
    found = [
        f"Simulated, the pipelined scatter-reduce takes {100 * simulated[top]:.0f} % less time than the three-phase "
        f"one at best ({top[0]} workers, {top[1]} MB), and more in {len(slower)} of {len(simulated)} combinations"
        + (f": {', '.join(slower)}." if slower else ".")
    ]
    if real:
        each = ", ".join(f"{100 * gain:.0f} % with {n} workers" for (n, _), gain in real.items())
        off = [row["executed_s"] / row["simulated_s"] - 1 for row in rows if row["executed_s"] is not None]
        found.append(f"Executed with {next(iter(real))[1]} MB it takes less time by {each}.")
        found.append(f"Executed seconds are above the simulated ones by {percent(off)}.")
    return tuple(found)


def draw(rows: Sequence[Row]) -> "Figure":
    figure = new_figure(1, width=7.0)
    axes = figure.subplots()
    simulated, real = gains(rows, "simulated_s"), gains(rows, "executed_s")
    for number, megabytes in enumerate(MEGABYTES):
        mine = [(n, 100 * gain) for (n, size), gain in simulated.items() if size == megabytes]
        axes.plot(*zip(*mine, strict=True), "o-", ms=3, color=f"C{number}", label=f"{megabytes} MB")
        done = [(n, 100 * gain) for (n, size), gain in real.items() if size == megabytes]
        if done:
            axes.plot(
                *zip(*done, strict=True),
                "x",
                ms=9,
                color=f"C{number}",
                label=f"{megabytes} MB, executed at {EXECUTED_LINK_MB_S} MB/s",
            )
    axes.axhline(0, lw=0.8, color="tab:gray")
    axes.set(xlabel="workers", ylabel="% less time than three-phase")
    axes.set_ylim(bottom=max(-60.0, axes.get_ylim()[0]))
    axes.set_xscale("log", base=2)
    axes.legend()
    return figure


SCRIPT = Script(
    name="synchronisation",
    question="How much faster is the pipelined scatter-reduce than the three-phase one?",
    measure=measure,
)

if __name__ == "__main__":
    run(SCRIPT)
