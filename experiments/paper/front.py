"""Which plans lie on the front of time and cost, and how does the recommended one compare with the baselines?"""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from experiments.paper.common import (
    PAPER_CLAIM,
    How,
    Result,
    Row,
    Script,
    Settings,
    new_figure,
    run,
    times,
)
from experiments.paper.planning import BASELINES, OURS, PAPER, Case, best, dollars, front, seconds, simulated_on
from funcpipe.core import Optimality

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BATCH = 64


def measure(settings: Settings) -> Result:
    batch, spec = BATCH if BATCH in settings.batches else settings.batches[0], settings.specs[0]
    cases = [Case(model=model, spec=spec, batch=batch) for model in settings.models]
    rows = tuple(compare(case, system) for case in cases for system in (PAPER, OURS))
    return Result(how=How.SIMULATED, on=simulated_on((spec,)), rows=rows, findings=findings(rows), figure=draw(rows))


def compare(case: Case, system: str) -> Row:
    """The front's points, the recommended one, and the baselines' plans as (seconds, dollars)."""
    found = front(case, system)
    points = [(seconds(plan), dollars(plan)) for plan in found.plans]
    plans = {baseline: best(case, baseline) for baseline in BASELINES}
    baselines = {name: (seconds(plan), dollars(plan)) for name, plan in plans.items() if plan is not None}
    return {
        **case.row(),
        "system": system,
        "points": points,
        "recommended": points[found.recommended],
        "complete": found.status is Optimality.OPTIMAL,
        "baselines": baselines,
        **against(points[found.recommended], baselines),
    }


def against(ours: tuple[float, float], baselines: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """Our point beside LambdaML's, and beside the baseline that is the fastest and the one that is the cheapest."""
    found: dict[str, Any] = {}
    if "lambdaml" in baselines:
        took, spent = baselines["lambdaml"]
        found |= {"speedup_lambdaml": took / ours[0], "saving_lambdaml": 1 - ours[1] / spent}
    if baselines:
        found["speedup_fastest"] = min(took for took, _ in baselines.values()) / ours[0]
        found["saving_cheapest"] = 1 - ours[1] / min(spent for _, spent in baselines.values())
    return found


def findings(rows: Sequence[Row]) -> tuple[str, ...]:
    found = []
    for system in dict.fromkeys(row["system"] for row in rows):
        mine = [row for row in rows if row["system"] == system]
        beside = [row for row in mine if "speedup_lambdaml" in row]
        dearer = sum(row["saving_cheapest"] < 0 for row in mine if "saving_cheapest" in row)
        found.append(
            f"The recommended plan of {system} is {times(row['speedup_lambdaml'] for row in beside)} as fast as "
            f"LambdaML at {times(1 - row['saving_lambdaml'] for row in beside)} its cost; against the best baseline in "
            f"each respect {times(row['speedup_fastest'] for row in mine if 'speedup_fastest' in row)} as fast, and "
            f"dearer than the cheapest in {dearer} of {len(mine)} models."
        )
    cut = sum(not row["complete"] for row in rows)
    counts = [len(row["points"]) for row in rows]
    state = f"{cut} of {len(rows)} were cut short by the time limit" if cut else "all are proved complete"
    found.append(f"The fronts have {min(counts)} to {max(counts)} plans; {state}. For comparison, {PAPER_CLAIM}.")
    return tuple(found)


def draw(rows: Sequence[Row]) -> "Figure":
    models = tuple(dict.fromkeys(row["model"] for row in rows))
    figure = new_figure(len(models), height=3.2)
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        mine = [row for row in rows if row["model"] == model]
        for row, colour in zip(mine, ("tab:orange", "tab:blue"), strict=True):
            axes.plot(*zip(*row["points"], strict=True), ".-", ms=3, lw=1, color=colour, label=row["system"])
            axes.plot(*row["recommended"], "*", ms=11, color=colour)
        for (name, point), mark in zip(mine[0]["baselines"].items(), itertools.cycle("sv^D"), strict=False):
            axes.plot(*point, mark, color="tab:gray", label=name)
        axes.set(title=f"{model}, batch {mine[0]['batch']}", xlabel="seconds of an iteration", ylabel="dollars")
        axes.set(xscale="log", yscale="log")
    figure.axes[0].legend()
    return figure


SCRIPT = Script(
    name="front", question="What lies on the front of time and cost, and what is recommended?", measure=measure
)

if __name__ == "__main__":
    run(SCRIPT)
