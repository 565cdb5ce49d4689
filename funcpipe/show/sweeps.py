"""Sweeps: the table while one goes on, its result, and a page with Optuna's figures."""

import io
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from funcpipe.core.distribution import needed_from
from funcpipe.core.texts import time_text, usd_text, without_surrogates
from funcpipe.show.describe import Column, Description, Table
from funcpipe.show.page import page_of
from funcpipe.show.page_parts import Section, facts, paragraph, table

if TYPE_CHECKING:
    import optuna

    from funcpipe.sweep.study import SweepStatus, TrialStatus
    from funcpipe.sweep.sweep import SweepResult

_ROWS = 12
"""The trials of which a terminal shows a row."""

_SHOWN_FIRST = ("running", "finished", "stopped", "pruned", "failed", "waiting")


def sweep(result: "SweepResult") -> Description:
    """Describe the result of a sweep."""
    return sweep_status(result.status)


def sweep_status(status: "SweepStatus", rows: int = _ROWS) -> Description:
    """Describe a sweep: the best trial, dollars, and a row for each of some trials, those that run and the best."""
    sign = 1 if status.direction == "minimize" else -1
    order = {state: place for place, state in enumerate(_SHOWN_FIRST)}
    trials = sorted(
        status.trials,
        key=lambda one: (order[one.state], sign * one.value if one.value is not None else float("inf"), one.number),
    )
    return Description(
        title=f"sweep {status.run}",
        facts=tuple(_facts(status)),
        tables=(_table(status, trials[:rows], "trials" if len(trials) <= rows else f"{rows} of {len(trials)} trials"),),
    )


def _facts(status: "SweepStatus") -> Iterator[tuple[str, str]]:
    best = status.best
    if best is not None:
        settings = ", ".join(f"{name}={_text(value)}" for name, value in best.settings.items())
        yield "best so far", f"trial {best.number}, {status.metric} {_text(best.value)}: {settings}"
    counts = ", ".join(f"{status.counts[state]} {state}" for state in _SHOWN_FIRST if state in status.counts)
    yield "trials", f"{counts or 'none yet'}, of {status.wanted}"
    cap = "" if status.max_usd is None else f" of ${status.max_usd:g}"
    yield "cost", f"${usd_text(status.usd)}{cap}, of which the client's requests ${usd_text(status.client_usd)}"
    if status.saved_usd:
        yield "pruning saved", f"${usd_text(status.saved_usd)}"
    yield "time", time_text(status.elapsed_s)


def _table(status: "SweepStatus", trials: "list[TrialStatus]", title: str) -> Table:
    names = list(dict.fromkeys(name for trial in status.trials for name in trial.settings))
    columns = [Column("trial"), Column("state", text=True), Column(status.metric), Column("step", drop=2)]
    columns += [*(Column(name, drop=1) for name in names), Column("$"), Column("seconds", drop=3)]
    columns += [Column("error", text=True, drop=4)] if any(trial.error for trial in trials) else []
    rows = []
    for trial in trials:
        settings = [_text(trial.settings.get(name)) for name in names]
        row = [str(trial.number), trial.state, _text(trial.value), str(trial.step), *settings, usd_text(trial.usd)]
        row += [f"{trial.seconds:.1f}", trial.error[:80]]
        rows.append(tuple(row[: len(columns)]))
    return Table(columns=tuple(columns), rows=tuple(rows), title=title)


def _text(value: object) -> str:
    return "-" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)


def write_sweep_page(result: "SweepResult", path: str | Path) -> None:
    """Write a page about a sweep to `path`: the best trial, all trials, and Optuna's figures."""
    status = result.status
    found = sweep_status(status, rows=len(status.trials))
    sections = [
        Section(name="sweep", title="Sweep", parts=(facts(found.facts),)),
        Section(name="figures", title="Figures", parts=tuple(_figures(result.study, status.metric))),
        Section(name="trials", title="Trials", parts=tuple(table(each) for each in found.tables)),
    ]
    text = page_of(sections, title=found.title, lead=status.line())
    Path(path).write_text(without_surrogates(text), encoding="utf-8")


_LEAST_FOR_IMPORTANCE = 8


def _figures(study: "optuna.Study", metric: str) -> Iterator[str]:
    """Draw Optuna's own figures of a study, as far as it has enough trials."""
    with needed_from("sweep"):
        import matplotlib
        import optuna

        matplotlib.use("Agg")
        from matplotlib import pyplot
    drawn = optuna.visualization.matplotlib
    complete = len(study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,)))
    varied = {name for trial in study.trials for name in trial.params}
    figures: dict[str, Callable[[], object]] = {
        "values as trials ended": lambda: drawn.plot_optimization_history(study, target_name=metric),
        "values while trials trained": lambda: drawn.plot_intermediate_values(study),
    }
    if varied:
        figures["values by setting"] = lambda: drawn.plot_slice(study, target_name=metric)
    if len(varied) > 1:
        figures["settings side by side"] = lambda: drawn.plot_parallel_coordinate(study, target_name=metric)
    if varied and complete >= _LEAST_FOR_IMPORTANCE:
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        figures["the settings that matter"] = lambda: drawn.plot_param_importances(study, evaluator=evaluator)
    if not complete:
        yield paragraph("No trial has finished.")
        return
    for caption, draw in figures.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna calls these figures experimental
            draw()
            buffer = io.StringIO()
            pyplot.gcf().savefig(buffer, format="svg", bbox_inches="tight")
        pyplot.close("all")
        picture = buffer.getvalue()
        yield f"<figure>{picture[picture.index('<svg') :]}<figcaption>{caption}</figcaption></figure>"
