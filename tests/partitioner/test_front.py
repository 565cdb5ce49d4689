"""The Pareto front: its points, its marks, its file and its picture."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.core import Optimality, TrainingSpec, from_text, to_text
from funcpipe.errors import Infeasible, InvalidValue
from funcpipe.partitioner.alternatives import (
    PAPER_WEIGHTS,
    USD_PER_MB_S,
    Front,
    best_point,
    pareto_front,
    plot_front,
    recommended_point,
)
from funcpipe.partitioner.problem.problem import Problem
from funcpipe.partitioner.search.exact import exact
from tests.examples import at_most
from tests.partitioner.instances import chain, platform


def points(front: Front) -> list[tuple[float, float]]:
    return [(plan.estimate.iteration_s, plan.estimate.cost_usd) for plan in front.plans if plan.estimate]


@at_most(8)
@given(seed=st.integers(0, 1000), skips=st.integers(0, 2))
def test_a_front_falls_and_holds_the_optimum_of_every_weight(seed: int, skips: int) -> None:
    profile, spec, training = chain(6, 3, seed, skips=skips), platform(), TrainingSpec(global_batch=16)
    front = pareto_front(profile, spec, training)
    assert front.status is Optimality.OPTIMAL
    seconds, dollars = zip(*points(front), strict=True)
    assert list(seconds) == sorted(set(seconds))
    assert list(dollars) == sorted(set(dollars), reverse=True)
    for name, weight in PAPER_WEIGHTS.items():
        value = weight * USD_PER_MB_S
        asked = TrainingSpec(global_batch=16, time_value=3600 * value)
        best = exact(Problem(profile=profile, spec=spec, training=asked)).solver
        assert best
        s, c = points(front)[front.marked[name]]
        assert c + value * s == pytest.approx(best.objective, rel=1e-8)


def test_the_papers_weights_are_dollars_for_an_hour() -> None:
    # 1, 2^16, 2^19, 2^22 MB·s for a second, at 0.0000166667 $ for a GB·s
    hourly = [weight * USD_PER_MB_S * 3600 for weight in PAPER_WEIGHTS.values()]
    assert hourly == pytest.approx([0, 3.84, 30.72, 245.76], rel=1e-4)


def test_the_recommended_point() -> None:
    # twice as fast for twice the money: 1/1; four times as fast for eight times the money: 3/7
    assert recommended_point([(1.0, 8.0), (2.0, 2.0), (4.0, 1.0)]) == 1
    # 0.8 of the extra money is just enough
    assert recommended_point([(1.0, 2.25), (2.0, 1.0)]) == 0
    assert recommended_point([(1.0, 2.26), (2.0, 1.0)]) == 1
    assert recommended_point([(3.0, 1.0)]) == 0
    with pytest.raises(InvalidValue):
        recommended_point([])
    assert best_point([(1.0, 8.0), (4.0, 1.0)], 0.0) == 1
    assert best_point([(1.0, 8.0), (4.0, 1.0)], 5.0) == 0


def test_limits_of_the_training_do_not_cut_the_front() -> None:
    profile, spec = chain(4, 2, 1), platform(2)
    free = pareto_front(profile, spec, TrainingSpec(global_batch=16))
    asked = pareto_front(profile, spec, TrainingSpec(global_batch=16, budget_usd=1e-9))
    assert points(free) == points(asked)


def test_a_front_of_a_merged_profile_is_in_its_own_layers() -> None:
    front = pareto_front(chain(9, 2, 1), platform(2), TrainingSpec(global_batch=16), layer_limit=4)
    assert {plan.stages[-1].stop for plan in front.plans} == {9}


def test_a_front_cut_short_says_so() -> None:
    front = pareto_front(chain(10, 3, 1), platform(), TrainingSpec(global_batch=64), time_limit_s=0.0)
    assert front.status is Optimality.FEASIBLE
    assert front.plans


def test_a_front_survives_its_json_and_can_be_drawn(tmp_path: Path) -> None:
    front = pareto_front(chain(4, 2, 1), platform(2), TrainingSpec(global_batch=16))
    assert from_text(Front, to_text(front), source="front.json") == front
    plot_front(front, tmp_path / "front.png")
    assert (tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")


def test_no_front_where_nothing_fits() -> None:
    with pytest.raises(Infeasible, match="no iteration fits into the life of a function"):
        pareto_front(chain(3), platform(lifetime_s=3.0, cold_start_s=2.999), TrainingSpec(global_batch=16))
