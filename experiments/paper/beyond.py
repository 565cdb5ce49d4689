"""Beyond the paper: what it gains to choose schedule, recomputation, formats on the wire and synchronisation as well.

The paper's own system runs GPipe, sends 32-bit tensors, keeps all activations and synchronises by its pipelined
scatter-reduce. For its best plan with each value of time: the cheapest plan that takes no longer, and the fastest that
costs no more, when one of the four may be chosen, and when all may. Sixteen bits on the wire round what they carry;
the rest changes no number.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from experiments.paper.common import How, Result, Row, Script, Settings, new_figure, percent, run, times
from experiments.paper.planning import (
    LIMIT_S,
    PAPER,
    Case,
    dollars,
    is_proved,
    profile_of,
    seconds,
    shape,
    simulated_on,
    training,
)
from funcpipe.core import Plan, Recompute, TrainingSpec, Wire
from funcpipe.errors import Infeasible
from funcpipe.partitioner.optimize import optimize
from funcpipe.platforms.catalog import load_spec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_EXACT: Mapping[str, Any] = {"schedule": None, "recompute": Recompute.AUTO, "sync": None}
_ROUNDED: Mapping[str, Any] = {"wire": Wire.BF16, "wire_sync": Wire.BF16}
FREE: Mapping[str, Mapping[str, Any]] = {
    "schedule": {"schedule": None},
    "recompute": {"recompute": Recompute.AUTO},
    "sync": {"sync": None},
    "16-bit wire": _ROUNDED,
    "all exact": _EXACT,
    "all": {**_EXACT, **_ROUNDED},
}
SMALLEST = 64  # batches below hardly fill a pipeline


def measure(settings: Settings) -> Result:
    spec = settings.specs[0]
    batches = [batch for batch in settings.batches if batch >= SMALLEST] or settings.batches
    cases = [Case(model=model, spec=spec, batch=batch) for model in settings.models for batch in batches]
    rows = tuple(row for case in cases for value in settings.time_values for row in compare(case, value))
    return Result(how=How.SIMULATED, on=simulated_on((spec,)), rows=rows, findings=findings(rows), figure=draw(rows))


def compare(case: Case, value: float) -> Iterator[Row]:
    """A row for each freedom."""
    wanted = training(PAPER, case.batch)
    paper = _plan(case, replace(wanted, time_value=value))
    if paper is None:
        return
    for name, freedom in FREE.items():
        free = replace(wanted, **freedom)
        in_time = _plan(case, replace(free, deadline_s=seconds(paper) * (1 + 1e-9)))
        in_budget = _plan(case, replace(free, budget_usd=dollars(paper) * (1 + 1e-9)))
        # the paper's plan is one of each space, and better than what a search has found that was cut short
        cheap, fast = min(in_time or paper, paper, key=dollars), min(in_budget or paper, paper, key=seconds)
        row = {**case.row(), "time_value": value, "paper_s": seconds(paper), "paper_usd": dollars(paper)}
        yield {
            **row,
            "free": name,
            "proved": all(is_proved(plan) for plan in (paper, in_time, in_budget)),
            "saving": 1 - dollars(cheap) / dollars(paper),
            "speedup": seconds(paper) / seconds(fast),
            "paper_plan": shape(paper),
            "cheapest": shape(cheap),
            "fastest": shape(fast),
        }


def _plan(case: Case, wanted: TrainingSpec) -> Plan | None:
    try:
        return optimize(profile_of(case.model, case.spec), load_spec(case.spec), wanted, time_limit_s=LIMIT_S)
    except Infeasible:
        return None


def values(rows: Sequence[Row], name: str, column: str) -> list[float]:
    """The column's values for a freedom."""
    return [row[column] for row in rows if row["free"] == name]


def findings(rows: Sequence[Row]) -> tuple[str, ...]:
    found = []
    for name in FREE:
        speedups, savings = values(rows, name, "speedup"), values(rows, name, "saving")
        nothing = sum(gain < 1.001 for gain in speedups)
        found.append(
            f"With {name} chosen: {times(speedups)} as fast at no more cost, {percent(savings)} cheaper in no more "
            f"time; less than 0.1 % faster in {nothing} of {len(speedups)}."
        )
    short = sum(not row["proved"] for row in rows)
    if short:
        found.append(
            f"In {short} of {len(rows)} comparisons a search was cut short after {LIMIT_S:g} s: it may gain more."
        )
    return tuple(found)


def draw(rows: Sequence[Row]) -> "Figure":
    figure = new_figure(2, width=4.8)
    left, right = figure.subplots(1, 2)
    left.boxplot([values(rows, name, "speedup") for name in FREE], orientation="horizontal", **_INKED)
    right.boxplot(
        [[100 * gain for gain in values(rows, name, "saving")] for name in FREE], orientation="horizontal", **_INKED
    )
    left.set_yticks(range(1, len(FREE) + 1), list(FREE))
    right.set_yticks(range(1, len(FREE) + 1), [])
    left.set_xlabel("times as fast at no more cost")
    right.set_xlabel("% cheaper in no more time")
    return figure


_BLUE = {"color": "tab:blue"}
_INKED: Mapping[str, Any] = {
    "boxprops": _BLUE,
    "whiskerprops": _BLUE,
    "capprops": _BLUE,
    "flierprops": {"markeredgecolor": "tab:blue", "markersize": 3},
}

SCRIPT = Script(
    name="beyond",
    question="Beyond the paper: what do schedule, recomputation, formats and synchronisation gain?",
    measure=measure,
)

if __name__ == "__main__":
    run(SCRIPT)
