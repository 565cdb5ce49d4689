"""Bayesian optimisation over the same space of plans, by Optuna."""

import itertools
import time

from funcpipe.core import Plan
from funcpipe.core.extras import install
from funcpipe.errors import SolverUnavailable
from funcpipe.partitioner.policies.common import best_of, fitted
from funcpipe.partitioner.problem.problem import Problem
from funcpipe.partitioner.problem.report import report

TRIALS = 200
_MOST_STAGES = 12


def bayes(problem: Problem, *, time_limit_s: float | None = None, trials: int = TRIALS, seed: int = 0) -> Plan:
    """The best plan of `trials` that a tree-structured Parzen estimator (Optuna's default) suggests one by one.

    It chooses the setting, the number of stages, their cuts and their sizes; stages recompute where they must. Raises
    SolverUnavailable without Optuna, Infeasible if no trial keeps the limits.
    """
    try:
        import optuna
    except ImportError as error:
        raise SolverUnavailable(f"the policy bayes needs Optuna; run: {install('bayesian')}") from error
    started_s = time.monotonic()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed, multivariate=True))
    settings, layers = problem.one_way_settings(), len(problem.profile.layers)
    sizes = sorted(problem.placed.open_sizes)
    seen: list[Plan | None] = []

    def price(trial: "optuna.Trial") -> float:
        setting = settings[trial.suggest_int("setting", 0, len(settings) - 1)]
        count = trial.suggest_int("stages", 1, min(layers, _MOST_STAGES))
        inner = {trial.suggest_int(f"cut{i}", 1, layers - 1) for i in range(count - 1)}
        cuts = list(itertools.pairwise((0, *sorted(inner), layers)))
        chosen = [sizes[trial.suggest_int(f"size{i}", 0, len(sizes) - 1)] for i in range(len(cuts))]
        plan = fitted(problem, setting, cuts, chosen)
        seen.append(plan)
        worst = 1e9
        return worst if plan is None else min(problem.goal.of_plan(plan), worst)

    study.optimize(price, n_trials=trials, timeout=time_limit_s)
    best = best_of(problem, seen, policy="bayes")
    return report(best, problem, name="bayes", bound=None, solve_s=time.monotonic() - started_s)
