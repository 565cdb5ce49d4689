"""Merged labels: no worse than those that they stand for, and no option is dropped that a better plan needs."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.partitioner.cost import Array, IntArray
from funcpipe.partitioner.problem.goal import Goal
from funcpipe.partitioner.search import search
from funcpipe.partitioner.search.completion_bounds import Promising
from funcpipe.partitioner.search.incumbents import Cheapest
from funcpipe.partitioner.search.initial_bounds import initial_bounds
from funcpipe.partitioner.search.label_search import grouped, merged, needed_options
from funcpipe.partitioner.search.option_network import OptionNetwork, all_ends, path_costs
from funcpipe.partitioner.search.spaces import all_spaces, with_stage_counts
from funcpipe.partitioner.search.time_window import TimeWindow
from tests.partitioner.instances import draw_problem
from tests.partitioner.oracles import by_plain_search, compare, in_all_modes, optima
from tests.partitioner.problems import larger


@given(
    points=st.lists(st.tuples(st.floats(0, 1e3), st.floats(0, 1e3), st.integers(0, 2)), min_size=1, max_size=40),
    count=st.integers(1, 20),
)
def test_groups_are_few_and_of_one_kind(points: list[tuple[float, float, int]], count: int) -> None:
    *columns, kind = np.array(points).T
    group = grouped(np.array(columns), kind.astype(np.int64), count)
    assert len(np.unique(group)) <= max(count, len(np.unique(kind)))
    assert group.max() == len(np.unique(group)) - 1
    for number in range(int(group.max()) + 1):
        assert len(np.unique(kind[group == number])) == 1


def test_groups_by_hand() -> None:
    group = grouped(np.array([[0.0, 1.0, 2.0, 9.0, 10.0]]), np.zeros(5, dtype=np.int64), 2)
    assert group.tolist() == [0, 0, 0, 1, 1]


def window_of(network: OptionNetwork, share: float) -> TimeWindow | None:
    """The window of all plans of a network that take less than a `share` of the way from the fastest to the slowest."""
    bounds = initial_bounds(network)
    if bounds is None:
        return None
    return TimeWindow(
        network=network,
        low_s=bounds.fastest_s * (1 - 1e-9),
        high_s=bounds.fastest_s + share * (bounds.slowest_s - bounds.fastest_s),
        time_value_usd_s=0.0,
        second_usd=bounds.least_price_usd_s * (1 - 1e-9),
        weights=bounds.weights,
    )


def all_paths(network: OptionNetwork) -> IntArray:
    """Every path from the start to the end, found without any bound."""

    def onward(node: int) -> Iterator[list[int]]:
        if node == 0:
            yield []
        for option in range(network.leaving[node], network.leaving[node + 1]):
            for rest in onward(int(network.options.after[option])):
                yield [option, *rest]

    found = list(onward(network.start))
    paths = np.full((max(map(len, found), default=0), len(found)), -1)
    for column, path in enumerate(found):
        paths[: len(path), column] = path
    return paths


def networks_of(seed: int) -> Iterator[OptionNetwork]:
    for space in all_spaces(draw_problem(seed)):
        if space.split is None:
            yield space.network
            if not space.counts_stages:
                yield with_stage_counts(space, space.network)


@pytest.mark.parametrize("seed", [*range(60), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(60, 300))])
def test_no_option_of_a_better_plan_is_dropped(seed: int) -> None:
    draw = np.random.default_rng(seed)
    for network in networks_of(seed):
        window = window_of(network, draw.uniform(0.05, 1.0))
        if window is None:
            continue
        paths, ways = all_ends(network, all_paths(network))
        costs = path_costs(network, paths, ways)
        inside = costs.fits & (costs.plan.iteration_s >= window.low_s) & (costs.plan.iteration_s <= window.high_s)
        if not inside.any():
            continue
        cost_usd: Array = costs.plan.cost_usd
        incumbents = Cheapest(Goal(), best=float(np.quantile(cost_usd[inside], draw.uniform(0, 1))))
        # a plan is not needed if its own stages do better in other ways, which may take longer than the window
        _, path = np.unique(paths, axis=1, return_inverse=True)
        least_usd = np.full(len(cost_usd), np.inf)
        np.minimum.at(least_usd, path, np.where(costs.fits, cost_usd, np.inf))
        better = inside & (cost_usd <= least_usd[path] * (1 + 1e-12))
        better &= cost_usd < incumbents.threshold_usd(costs.plan.iteration_s)
        needed = np.unique(paths[:, better])
        for labels in (1, 3, 1000):
            kept = needed_options(window, incumbents, labels=labels)
            assert kept[needed[needed >= 0]].all()


def test_a_merged_label_is_no_worse_than_any_of_its_group() -> None:
    draw, compared = np.random.default_rng(0), 0
    for network in itertools.chain.from_iterable(map(networks_of, range(8))):
        window = window_of(network, 1.0)
        if window is None:
            continue
        promising = Promising.of(window, Cheapest(Goal()))
        at_node = [promising.of_end()]
        for node in range(1, network.start):
            labels, bounds = promising.at(node, at_node), promising.bounds
            at_node.append(labels)
            if len(labels) < 2:
                continue
            group = grouped(draw.uniform(0, 1, (2, len(labels))), labels.stages, 3)
            one = merged(labels, group).take(group)
            assert (one.stages == labels.stages).all()
            for least, value in zip(one.tail, labels.tail, strict=True):
                assert (least <= value).all()
            assert (bounds.cheapest_usd(one, node) <= bounds.cheapest_usd(labels, node) * (1 + 1e-12)).all()
            assert (bounds.earliest_s(one, node) <= bounds.earliest_s(labels, node) * (1 + 1e-12)).all()
            compared += int((one.tail.price_usd_s < labels.tail.price_usd_s).sum())
    assert compared > 100


@pytest.fixture
def merged_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small problems are searched before labels are merged: here they are merged first, and windows split."""
    for name, value in {
        "_FEW_OPTIONS": 1,
        "_FEW_PAIRS": 0,
        "_PAIRS": 5000,
        "_FEW_LABELS": 2,
        "_MORE_LABELS": 6,
    }.items():
        monkeypatch.setattr(search, name, value)


@pytest.mark.usefixtures("merged_at_once")
@pytest.mark.parametrize("seed", range(6))
def test_merging_labels_in_every_window_changes_no_plan(seed: int) -> None:
    compare(draw_problem(seed), optima(f"all modes {seed}"))
    compare(larger(seed), optima(f"larger {seed}"))


@pytest.mark.long
@pytest.mark.usefixtures("merged_at_once")
@pytest.mark.parametrize("seed", range(6, 60))
def test_merging_labels_in_every_window_changes_no_plan_of_more_problems(seed: int) -> None:
    compare(draw_problem(seed), in_all_modes(draw_problem(seed), seed))
    compare(larger(seed), by_plain_search(larger(seed), seed))
