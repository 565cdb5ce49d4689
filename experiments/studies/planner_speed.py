"""How fast the best plan is found and proved: by layers and models, beside the solvers, and the whole front.

Five numbers of replicas and eight sizes unless said otherwise; money weighted with the paper's four values of time. The
schedule is GPipe's, or chosen with the plan (`auto`). Seconds are those of processors.
Writes planner_speed.json; parts that are not measured keep what the file says of them.
"""

import argparse
import itertools
import json
import resource
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.studies.planner_profiles import SHAPES, platform, profile
from funcpipe.core import ModelProfile, Optimality, Plan, PlatformSpec, ScheduleKind, Sync, TrainingSpec
from funcpipe.errors import FuncPipeError
from funcpipe.partitioner.alternatives import pareto_front
from funcpipe.partitioner.mip import gurobi, highs, scip
from funcpipe.partitioner.problem.problem import Problem
from funcpipe.partitioner.search.exact import exact

BATCH = 64  # with micro-batches of 4: 1, 2, 4, 8 or 16 replicas
TIME_VALUES = (0.0, 3.84, 30.72, 245.76)
BARS_S = {24: 0.5, 40: 3.0, 100: 10.0}
FRONT_LAYERS, FRONT_BAR_S, MEMORY_BAR_MB = 24, 3.0, 400
SOLVERS: Sequence[Callable[..., Plan]] = (highs, scip, gurobi)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", default=list(PARTS), help=f"of {', '.join(PARTS)}; or all")
    parser.add_argument("--output", type=Path, default=Path("out/planner"))
    parser.add_argument("--solver-limit", type=float, default=60.0, help="seconds for each solver and instance")
    parser.add_argument("--solver-layers", type=int, nargs="*", default=[6, 8, 10, 12])
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "planner_speed.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for part in options.parts:
        results[part] = list(PARTS[part](options))
        results.setdefault("memory_mb", {})[part] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        path.write_text(json.dumps(results, indent=1) + "\n")
    show(results)


def processor_s() -> float:
    """Processor seconds of this process and of the solvers' processes that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def solve(
    measured: ModelProfile, spec: PlatformSpec, *, time_value: float, schedule: ScheduleKind | None
) -> dict[str, Any]:
    """One proof of the exact search."""
    training = TrainingSpec(global_batch=BATCH, time_value=time_value, schedule=schedule)
    problem = Problem(profile=measured, spec=spec, training=training)
    started_s = processor_s()
    plan = exact(problem)
    seconds = processor_s() - started_s
    assert plan.solver is not None
    assert plan.solver.status is Optimality.OPTIMAL
    return {
        "model": measured.model,
        "layers": len(measured.layers),
        "sizes": len(spec.sizes),
        "degrees": len(problem.degrees),
        "time_value": time_value,
        "seconds": seconds,
        "objective": plan.solver.objective,
    }


def bars(options: argparse.Namespace, schedule: ScheduleKind | None = ScheduleKind.GPIPE) -> Iterator[dict[str, Any]]:
    """Every reference model stretched to 24, 40 and 100 layers, every value of time."""
    spec = platform()
    for layers, name, value in itertools.product(BARS_S, SHAPES, TIME_VALUES):
        yield solve(profile(name, spec, layers=layers), spec, time_value=value, schedule=schedule)


def auto(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The same, the schedule chosen with the plan."""
    yield from bars(options, schedule=None)


def fronts(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The whole Pareto front of every reference model."""
    spec = platform()
    for name in SHAPES:
        measured = profile(name, spec, layers=FRONT_LAYERS)
        started_s = processor_s()
        front = pareto_front(measured, spec, TrainingSpec(global_batch=BATCH))
        seconds = processor_s() - started_s
        assert front.status is Optimality.OPTIMAL
        yield {"model": name, "layers": FRONT_LAYERS, "points": len(front.plans), "seconds": seconds}


def solvers(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The exact search and each solver on the same instances, one number of replicas and GPipe, in one run."""
    spec = platform()
    training = TrainingSpec(
        global_batch=BATCH, time_value=3.84, replicas=(4,), schedule=ScheduleKind.GPIPE, sync=Sync.PIPELINED
    )
    for layers, name in itertools.product(options.solver_layers, ("amoebanet-d18", "bert-large")):
        problem = Problem(profile=profile(name, spec, layers=layers), spec=spec, training=training)
        started_s = processor_s()
        plan = exact(problem)
        exact_s = processor_s() - started_s
        for solver in SOLVERS:
            row = {"model": name, "layers": layers, "solver": solver.__name__, "exact_s": exact_s}
            yield row | beside(problem, plan, solver, options.solver_limit)


def beside(problem: Problem, plan: Plan, solver: Callable[..., Plan], limit_s: float) -> dict[str, Any]:
    """What a solver takes, whether it proves its plan, and by what share that is worse than `plan`."""
    started_s = processor_s()
    try:
        found = solver(problem, time_limit_s=limit_s)
    except FuncPipeError as error:
        return {"failed": str(error)}
    assert plan.solver is not None
    assert found.solver is not None
    return {
        "seconds": processor_s() - started_s,
        "proved": found.solver.status is Optimality.OPTIMAL,
        "gap": found.solver.gap,
        "excess": found.solver.objective / plan.solver.objective - 1,
    }


PARTS = {"bars": bars, "auto": auto, "front": fronts, "solvers": solvers}


def show(results: dict[str, Any]) -> None:
    console = Console(highlight=False, width=140)
    titles = {"bars": "seconds to prove the best plan, worst of 4 values; GPipe", "auto": "the schedule chosen as well"}
    for part, title in titles.items():
        if part in results:
            console.print(bars_table(results[part], title))
    for part, table_of in (("front", front_table), ("solvers", solvers_table)):
        if part in results:
            console.print(table_of(results[part]))
    for part, memory_mb in results["memory_mb"].items():
        console.print(f"peak memory after {part}: {memory_mb:.0f} MB, bar {MEMORY_BAR_MB} MB")


def bars_table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    table = Table("layers", "bar s", *SHAPES, title=title)
    for layers, bar_s in BARS_S.items():
        worst = [
            max(row["seconds"] for row in rows if row["layers"] == layers and row["model"] == name) for name in SHAPES
        ]
        table.add_row(str(layers), f"{bar_s:g}", *(f"{seconds:.2f}" for seconds in worst))
    return table


def front_table(rows: Sequence[dict[str, Any]]) -> Table:
    title = f"the whole front of {FRONT_LAYERS} layers, bar {FRONT_BAR_S:g} s"
    table = Table("model", "points", "seconds", title=title)
    for row in rows:
        table.add_row(row["model"], str(row["points"]), f"{row['seconds']:.2f}")
    return table


def solvers_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("model", "layers", "solver", "seconds", "/ exact", "proved", "gap", "excess", title="solvers")
    for row in rows:
        head = row["model"], str(row["layers"]), row["solver"]
        if "failed" in row:
            table.add_row(*head, "-", "-", f"no: {row['failed'].split(' (')[0]}", "-", "-")
            continue
        ratio, gap = row["seconds"] / row["exact_s"], "-" if row["gap"] is None else f"{row['gap']:.1e}"
        proved = "yes" if row["proved"] else "no"
        table.add_row(*head, f"{row['seconds']:.2f}", f"{ratio:.0f}", proved, gap, f"{row['excess']:.1e}")
    return table


if __name__ == "__main__":
    main()
