"""How much better are the plans of our search than those of TPDMP, PipeDream, Bayesian optimisation and even cuts?

All plan for the paper's own system, and choose among the same cuts, replicas and sizes; what counts is the weighted sum
of dollars and seconds. Bayes is Optuna's estimator, with two hundred trials.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from experiments.paper.common import How, Result, Row, Script, Settings, new_figure, percent, run
from experiments.paper.planning import LIMIT_S, OURS, PAPER, Case, best, is_proved, simulated_on

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OTHERS = ("tpdmp", "pipedream", "bayes", "uniform")


def measure(settings: Settings) -> Result:
    spec = settings.specs[0]
    cases = [Case(model=model, spec=spec, batch=batch) for model in settings.models for batch in settings.batches]
    rows = tuple(
        compare(case, policy, value) for case in cases for value in settings.time_values for policy in POLICIES
    )
    return Result(how=How.SIMULATED, on=simulated_on((spec,)), rows=rows, findings=findings(rows), figure=draw(rows))


POLICIES = (OURS, *OTHERS)


def compare(case: Case, policy: str, value: float) -> Row:
    """A policy's plan for one value of time."""
    began_s = time.perf_counter()
    plan = best(case, PAPER, policy=policy, time_value=value)
    took_s = time.perf_counter() - began_s
    solved = None if plan is None else plan.solver
    objective = None if solved is None else solved.objective
    return {
        **case.row(),
        "time_value": value,
        "policy": policy,
        "objective": objective,
        "proved": is_proved(plan),
        "search_s": took_s,
    }


def excess(rows: Sequence[Row], policy: str) -> list[float]:
    """By what share the policy's plans are worse than ours, where it has one."""
    place = ("model", "platform", "batch", "time_value")
    ours = {tuple(row[k] for k in place): row["objective"] for row in rows if row["policy"] == OURS}
    mine = [row for row in rows if row["policy"] == policy and row["objective"] is not None]
    pairs = ((row["objective"], ours[tuple(row[k] for k in place)]) for row in mine)
    return [theirs / best_known - 1 for theirs, best_known in pairs if best_known is not None]


def findings(rows: Sequence[Row]) -> tuple[str, ...]:
    found = []
    for policy in OTHERS:
        worse, asked = excess(rows, policy), sum(row["policy"] == policy for row in rows)
        equal = sum(share < 1e-6 for share in worse)
        better = sum(share < -1e-6 for share in worse)
        none = f"; it has no plan for {asked - len(worse)}" if asked > len(worse) else ""
        lost = f"; it is better in {better}" if better else ""
        found.append(
            f"Plans of {policy} are worse than ours by {percent(worse)}, and as good in {equal - better} of {asked}"
            f"{lost}{none}."
        )
    short = sum(not row.get("proved", True) for row in rows if row["policy"] == OURS)
    if short:
        found.append(f"{short} of our searches were cut short after {LIMIT_S:g} s: only there can others be better.")
    seconds = {policy: sum(row["search_s"] for row in rows if row["policy"] == policy) for policy in POLICIES}
    each = len(rows) / len(POLICIES)
    found.append(
        "Seconds for a plan: " + ", ".join(f"{name} {took / each:.2f}" for name, took in seconds.items()) + "."
    )
    return tuple(found)


def draw(rows: Sequence[Row]) -> "Figure":
    figure = new_figure(1, width=7.0)
    axes = figure.subplots()
    for policy in OTHERS:
        worse = sorted(100 * share for share in excess(rows, policy))
        shares = [(i + 1) / len(worse) for i in range(len(worse))]
        axes.plot(worse, shares, drawstyle="steps-post", label=policy)
    axes.set(xlabel="% worse than our plan", ylabel="share of settings")
    axes.set_xscale("symlog", linthresh=1)
    axes.legend()
    return figure


SCRIPT = Script(
    name="search",
    question="How does our search compare with TPDMP, PipeDream, Bayes and uniform cuts?",
    measure=measure,
)

if __name__ == "__main__":
    run(SCRIPT)
