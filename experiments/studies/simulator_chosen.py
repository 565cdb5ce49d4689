"""Chosen plans in the closed form and in the simulator, and what choosing by simulation saves.

Plans the four models of `experiments/profiles` on AWS Lambda at two batches and four values of time. Each row has the
plan that is best by the closed form, simulated, and the one that is best of five when they are simulated.
"""

import argparse
import itertools
from pathlib import Path
from statistics import median

from funcpipe.core import ModelProfile, SolverReport, TrainingSpec, read
from funcpipe.platforms.catalog import load_spec
from funcpipe.report.best_simulated import best_simulated

PROFILES = Path(__file__).parents[1] / "profiles"
BATCHES, TIME_VALUES = (64, 256), (0.0, 3.84, 30.72, 245.76)
PLANS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds of searching for each plan")
    options = parser.parse_args()
    spec, off, saved = load_spec("aws-lambda"), [], []
    print(f"{'model':14} {'batch':>5} {'$/h':>7} {'form s':>8} {'simulated':>9} {'off':>7} {'of five':>8} {'saved':>6}")
    for path, batch, value in itertools.product(sorted(PROFILES.glob("*.json")), BATCHES, TIME_VALUES):
        profile, training = read(ModelProfile, path), TrainingSpec(global_batch=batch, time_value=value)
        first, best = (
            best_simulated(profile, spec, training, count, time_limit_s=options.time_limit) for count in (1, PLANS)
        )
        assert first.estimate is not None
        first_s, first_objective = simulated(first.solver, value)
        best_s, best_objective = simulated(best.solver, value)
        off.append(first_s / first.estimate.iteration_s - 1)
        saved.append(1 - best_objective / first_objective)
        print(
            f"{path.stem:14} {batch:5} {value:7} {first.estimate.iteration_s:8.3f} {first_s:9.3f} {off[-1]:+7.1%} "
            f"{best_s:8.3f} {saved[-1]:6.1%}",
            flush=True,
        )
    print(f"off by {min(off):+.1%} to {max(off):+.1%}, in the median {median(off):+.1%}")
    print(f"saved of the objective: {median(saved):.1%} in the median, {max(saved):.1%} at most")


def simulated(solver: SolverReport | None, time_value: float) -> tuple[float, float]:
    """Seconds of a simulated iteration, and its dollars with the time that it takes."""
    assert solver is not None
    assert solver.simulated_s is not None
    assert solver.simulated_usd is not None
    return solver.simulated_s, solver.simulated_usd + time_value / 3600 * solver.simulated_s


if __name__ == "__main__":
    main()
