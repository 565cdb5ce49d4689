"""The mixed-integer programme against the exact search."""

from dataclasses import replace

import pytest

from funcpipe.core import Optimality, TrainingSpec
from funcpipe.errors import Infeasible
from funcpipe.partitioner.exact import exact
from funcpipe.partitioner.problem import Problem
from funcpipe.partitioner.solvers import highs
from tests.partitioner.instances import MB, chain, platform


@pytest.mark.parametrize("seed", range(6))
def test_highs_equals_the_exact_search(seed: int) -> None:
    profile, spec = chain(4, 2, seed, skips=seed % 3), platform(2)
    weighted = TrainingSpec(global_batch=16, replicas=(1, 2), time_value=[0.0, 30.0][seed % 2])
    best = exact(Problem(profile=profile, spec=spec, training=weighted))
    assert best.estimate
    hasty = replace(weighted, deadline_s=best.estimate.iteration_s * 0.95)
    thrifty = replace(weighted, budget_usd=best.estimate.cost_usd * 1.1)
    for training in (weighted, hasty, thrifty):
        try:
            expected = exact(Problem(profile=profile, spec=spec, training=training))
        except Infeasible:
            with pytest.raises(Infeasible):
                highs(Problem(profile=profile, spec=spec, training=training))
            continue
        found = highs(Problem(profile=profile, spec=spec, training=training))
        assert found.solver
        assert expected.solver
        assert found.solver.objective == pytest.approx(expected.solver.objective, rel=1e-6)
        assert found.solver.status is Optimality.OPTIMAL
        assert found.solver.bound == pytest.approx(found.solver.objective, rel=1e-5)


def test_highs_says_infeasible() -> None:
    with pytest.raises(Infeasible):
        highs(
            Problem(
                profile=replace(chain(3), base_memory_bytes=9000 * MB),
                spec=platform(),
                training=TrainingSpec(global_batch=16),
            )
        )
    with pytest.raises(Infeasible):
        highs(Problem(profile=chain(3), spec=platform(), training=TrainingSpec(global_batch=16, deadline_s=0.01)))
