"""The table of ways of synchronising beside each stage in each way, worked out alone."""

from dataclasses import replace

import numpy as np
import pytest

from funcpipe.core import TrainingSpec
from funcpipe.partitioner.cost.stores import way_fits, way_usd
from funcpipe.partitioner.cost.sync_ways import sync_times, way_table, ways_of
from funcpipe.partitioner.problem.options import edge_loads
from funcpipe.partitioner.problem.problem import Problem
from tests.partitioner.instances import chain, platform
from tests.partitioner.problems import with_stores


@pytest.mark.parametrize("seed", range(24))
def test_a_stage_takes_the_fastest_of_the_ways_up_to_a_column(seed: int) -> None:
    check_table(with_stores(seed))


def test_so_does_one_of_128_replicas_that_wait_for_requests() -> None:
    """A replica has 64 gets open at once, and 127 others; where sums travel in one object, that costs little."""
    training = TrainingSpec(global_batch=512, replicas=(128,))
    check_table(Problem(profile=chain(2), spec=replace(platform(), latency_s=0.04), training=training))


def check_table(problem: Problem) -> None:
    """The table has, for each stage on each size, what each way takes alone."""
    loads = edge_loads(problem, problem.stage_graph)
    for setting in problem.settings():
        table, ways = way_table(loads, setting, workers=7), ways_of(setting)
        shape = len(loads.summed_bytes), len(problem.spec.sizes)
        fits, usd, seconds = (
            np.stack([np.broadcast_to(of_way(way), shape) for way in ways], axis=-1)
            for of_way in (
                lambda way, setting=setting: way_fits(way, loads, setting),
                lambda way, setting=setting: way_usd(way, loads, setting),
                lambda way, setting=setting: sync_times(loads, setting, workers=7, way=way),
            )
        )
        usd, seconds = np.where(fits, usd, np.inf), np.where(fits, seconds, np.inf)
        order = np.argsort(usd, axis=-1, kind="stable")
        for stage, size in np.ndindex(shape):
            row = int(table.row[stage, size])
            number = [ways.index(table.way(row, column)) for column in range(table.columns)]
            fastest_s = np.minimum.accumulate(seconds[stage, size, order[stage, size]])
            upto = [order[stage, size].tolist().index(way) for way in number]
            np.testing.assert_allclose(table.seconds[row], fastest_s[upto], rtol=1e-12)
            assert table.seconds[row, -1] == pytest.approx(fastest_s[-1], rel=1e-12)
            columns = np.arange(table.columns)
            np.testing.assert_array_equal(table.usd_of(np.full_like(columns, row), columns), usd[stage, size, number])


def test_sizes_with_the_same_links_share_a_row_but_where_a_backward_hides_the_sums() -> None:
    """Nothing waits for the backward of a first stage, which takes longer on a small size."""
    spec = platform()
    sizes = tuple(replace(size, upload_bytes_s=1e7, download_bytes_s=2e7) for size in spec.sizes)
    spec = replace(spec, sizes=sizes)
    problem = Problem(profile=chain(5), spec=spec, training=TrainingSpec(global_batch=16, replicas=(2,)))
    graph, setting = problem.stage_graph, problem.settings()[0]
    table = way_table(edge_loads(problem, graph), setting, workers=1)
    shared = (table.row == table.row[:, :1]).all(axis=1)
    np.testing.assert_array_equal(shared, graph.first > 0)
    assert sorted(set(table.row.ravel().tolist())) == list(range(len(table.seconds)))
