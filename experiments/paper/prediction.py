"""How far is the prediction from what is simulated task by task, and from what is executed?

The closed form predicts every plan that the paper's system and ours choose; the simulator plays the same plans. What
the systems of `executed` took is set beside both.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from experiments.paper.common import How, Result, Row, Script, Settings, new_figure, percent, run
from experiments.paper.executed import executed_rows
from experiments.paper.planning import OURS, PAPER, Case, best, profile_of, seconds, shape, simulated_on
from funcpipe.analysis.predict import forecast
from funcpipe.platforms.catalog import load_spec

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def measure(settings: Settings) -> Result:
    spec = settings.specs[0]
    cases = [Case(model=model, spec=spec, batch=batch) for model in settings.models for batch in settings.batches]
    rows = [row for case in cases for row in simulated(case, settings.time_values)]
    if settings.execute:
        asked = (settings.platform, settings.like, settings.max_usd, settings.steps)
        rows += [executed(row) for row in executed_rows(*asked) if "observed_s" in row]
    how = How.BOTH if settings.execute else How.SIMULATED
    place = simulated_on((spec,)) + (f"; executed on {settings.place}" if settings.execute else "")
    return Result(how=how, on=place, rows=tuple(rows), findings=findings(rows), figure=draw(rows))


def simulated(case: Case, time_values: Sequence[float]) -> Iterator[Row]:
    """Each system's plan for each value of time: the closed form, and the simulation."""
    for system in (PAPER, OURS):
        plans = {best(case, system, time_value=value): None for value in time_values}
        for plan in plans:
            if plan is None:
                continue
            played_s = forecast(plan, profile_of(case.model, case.spec), load_spec(case.spec)).duration_s
            row = {**case.row(), "system": system, "plan": shape(plan), "how": How.SIMULATED.value}
            yield {**row, "predicted_s": seconds(plan), "found_s": played_s}


def executed(row: Row) -> Row:
    """What a system took, beside what the simulator, or for a server the closed form, had predicted."""
    predicted_s = row.get("simulated_s", row["predicted_s"])
    return {
        "model": "characters",
        "system": row["system"],
        "plan": row["plan"],
        "how": How.EXECUTED.value,
        "predicted_s": predicted_s,
        "found_s": row["observed_s"],
    }


def errors(rows: Sequence[Row], how: How, system: str | None = None) -> list[float]:
    """By what share what was found is above the prediction."""
    mine = [row for row in rows if row["how"] == how.value and system in (None, row["system"])]
    return [row["found_s"] / row["predicted_s"] - 1 for row in mine]


def findings(rows: Sequence[Row]) -> tuple[str, ...]:
    found = [
        f"Simulated iterations of {len(errors(rows, How.SIMULATED, system))} plans of {system} are "
        f"{percent(errors(rows, How.SIMULATED, system))} above the closed form."
        for system in (PAPER, OURS)
    ]
    real = errors(rows, How.EXECUTED)
    if real:
        within = sum(abs(error) <= 0.1 for error in real)
        found.append(
            f"Executed steps are {percent(real)} above what the simulator had predicted, or for HybridPS the closed "
            f"form; {within} of {len(real)} differ by at most 10 %."
        )
    return tuple(found)


def draw(rows: Sequence[Row]) -> "Figure":
    figure = new_figure(1, width=5.5, height=4.0)
    axes = figure.subplots()
    for how, mark, colour in ((How.SIMULATED, ".", "tab:blue"), (How.EXECUTED, "x", "tab:red")):
        mine = [(row["predicted_s"], row["found_s"]) for row in rows if row["how"] == how.value]
        if mine:
            axes.plot(*zip(*mine, strict=True), mark, color=colour, label=how.value)
    ends = [min(row["predicted_s"] for row in rows), max(row["predicted_s"] for row in rows)]
    axes.plot(ends, ends, lw=0.8, color="tab:gray", label="equal")
    axes.set(xscale="log", yscale="log", xlabel="predicted seconds", ylabel="simulated or executed seconds")
    axes.legend()
    return figure


SCRIPT = Script(name="prediction", question="How large is the error of the prediction?", measure=measure)

if __name__ == "__main__":
    run(SCRIPT)
