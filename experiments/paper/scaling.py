"""How does training scale: with the batch, and with the replicas of every stage?

The left figure lets each system choose its plan for a batch, where an hour is worth 30.72 dollars. The right one fixes
the largest batch, and how many replicas FuncPipe has.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from experiments.paper.common import How, Result, Row, Script, Settings, new_figure, run
from experiments.paper.planning import BASELINES, OURS, PAPER, Case, best, dollars, seconds, simulated_on

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BATCHES = (16, 32, 64, 128, 256, 512)
REPLICAS = (1, 2, 4, 8, 16)
TIME_VALUE = 30.72
MODEL = "amoebanet-d36"


def measure(settings: Settings) -> Result:
    model = MODEL if MODEL in settings.models else settings.models[0]
    spec, largest = settings.specs[0], max(settings.batches)
    rows = [
        row for batch in BATCHES if batch <= 2 * largest for row in of_batch(Case(model=model, spec=spec, batch=batch))
    ]
    rows += of_replicas(Case(model=model, spec=spec, batch=largest))
    return Result(
        how=How.SIMULATED, on=simulated_on((spec,)), rows=tuple(rows), findings=findings(rows), figure=draw(rows)
    )


def of_batch(case: Case) -> Iterator[Row]:
    """Each system's own plan."""
    for system in (*BASELINES, PAPER, OURS):
        wanted: dict[str, Any] = {} if system in BASELINES else {"time_value": TIME_VALUE}
        plan = best(case, system, **wanted)
        if plan is not None:
            yield {
                **case.row(),
                "by": "batch",
                "system": system,
                "workers": plan.workers,
                "replicas": plan.replicas,
                "samples_s": case.batch / seconds(plan),
                "usd_1000_samples": 1000 * dollars(plan) / case.batch,
            }


def of_replicas(case: Case) -> Iterator[Row]:
    """FuncPipe's plans with so many replicas of every stage."""
    for system in (PAPER, OURS):
        for replicas in REPLICAS:
            if case.batch % (4 * replicas):
                continue
            plan = best(case, system, time_value=TIME_VALUE, replicas=(replicas,))
            if plan is not None:
                yield {
                    **case.row(),
                    "by": "replicas",
                    "system": system,
                    "workers": plan.workers,
                    "replicas": replicas,
                    "samples_s": case.batch / seconds(plan),
                    "usd_1000_samples": 1000 * dollars(plan) / case.batch,
                }


def _of(rows: Sequence[Row], by: str, system: str) -> list[Row]:
    return [row for row in rows if (row["by"], row["system"]) == (by, system)]


def findings(rows: Sequence[Row]) -> tuple[str, ...]:
    found = []
    for system in ("lambdaml", PAPER, OURS):
        mine = _of(rows, "batch", system)
        if len(mine) > 1:
            first, last = mine[0], mine[-1]
            found.append(
                f"From batch {first['batch']} to {last['batch']} {system} goes from {first['samples_s']:.2f} to "
                f"{last['samples_s']:.2f} samples/s with {first['workers']} to {last['workers']} workers, and from "
                f"{first['usd_1000_samples']:.3f} to {last['usd_1000_samples']:.3f} dollars for 1000 samples."
            )
    for system in (PAPER, OURS):
        mine = _of(rows, "replicas", system)
        if len(mine) > 1:
            first, last = mine[0], mine[-1]
            gain = last["samples_s"] / first["samples_s"]
            times = last["replicas"] / first["replicas"]
            dearer = last["usd_1000_samples"] / first["usd_1000_samples"]
            found.append(
                f"With {times:g} times the replicas {system} is {gain:.2f}x as fast at batch {first['batch']}, "
                f"an efficiency of {100 * gain / times:.0f} %, at {dearer:.2f} times the cost."
            )
    return tuple(found)


def draw(rows: Sequence[Row]) -> "Figure":
    figure = new_figure(2, width=4.8, height=3.2)
    left, right = figure.subplots(1, 2)
    for system in dict.fromkeys(row["system"] for row in rows):
        mine = _of(rows, "batch", system)
        left.plot([row["batch"] for row in mine], [row["samples_s"] for row in mine], ".-", label=system)
    for system, colour in ((PAPER, "tab:purple"), (OURS, "tab:brown")):
        mine = _of(rows, "replicas", system)
        right.plot([row["replicas"] for row in mine], [row["samples_s"] for row in mine], ".-", color=colour)
    left.set(xscale="log", yscale="log", xlabel="global batch", ylabel="samples/s")
    right.set(xscale="log", yscale="log", xlabel="replicas of every stage", ylabel="samples/s")
    left.legend()
    return figure


SCRIPT = Script(name="scaling", question="How does training scale with the batch and the workers?", measure=measure)

if __name__ == "__main__":
    run(SCRIPT)
