"""What several stores gain: the objective of plans with the best stores by that with the default one.

    python -m experiments.studies.stores --profiles resnet101 bert-large --time-values 3.84 30.72 245.76

Each plan is simulated, too. Seconds are processor seconds of planning.
"""

import argparse
import time

from funcpipe.core import ModelProfile, Plan, PlatformSpec, TrainingSpec, read
from funcpipe.partitioner.optimize import optimize
from funcpipe.platforms.catalog import load_spec
from funcpipe.report.predict import predict

PROFILES = ("resnet101", "bert-large", "amoebanet-d18", "amoebanet-d36")
TIME_VALUES = (3.84, 30.72, 245.76)


def main() -> None:
    """Print a row for each profile and value of time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profiles", nargs="+", default=PROFILES)
    parser.add_argument("--time-values", nargs="+", type=float, default=TIME_VALUES)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--platform", default="aws-lambda")
    options = parser.parse_args()
    spec = load_spec(options.platform)
    print("profile, $/h: default, best stores, ratio; simulated by form; planning s; stores, stages x replicas, sync")
    for name in options.profiles:
        profile = read(ModelProfile, f"experiments/profiles/{name}.json")
        for value in options.time_values:
            plain, plain_s = _plan(profile, spec, TrainingSpec(global_batch=options.batch, time_value=value))
            asked = TrainingSpec(global_batch=options.batch, time_value=value, stores="auto")  # type: ignore[arg-type]
            best, best_s = _plan(profile, spec, asked)
            assert plain.solver
            assert best.solver
            assert best.estimate
            simulated = predict(best, profile, spec).end_s / best.estimate.iteration_s
            ratio = best.solver.objective / plain.solver.objective
            shape = f"{len(best.stages)} x {best.replicas}, {best.sync.value}"
            print(
                f"{name}, {value:g}: {plain.solver.objective:.6f}, {best.solver.objective:.6f}, {ratio:.3f}; "
                f"{simulated:.3f}; {plain_s:.1f}, {best_s:.1f}; {best.stores.messages}, {best.stores.sums}, "
                f"{best.stores.checkpoints}; {shape}; {best.solver.status.value}",
                flush=True,
            )


def _plan(profile: ModelProfile, spec: PlatformSpec, training: TrainingSpec) -> tuple[Plan, float]:
    started_s = time.process_time()
    return optimize(profile, spec, training), time.process_time() - started_s


if __name__ == "__main__":
    main()
