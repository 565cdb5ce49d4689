"""Running statistics over functions equal those of a script that accumulates gradients over the same micro-batches."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from funcpipe.core import ScheduleKind
from funcpipe.errors import PlanError
from funcpipe.training.averaging import EMA, WeightAverage
from funcpipe.training.norms import GradientNorm
from funcpipe.training.state import AVERAGED, capture_state
from tests.jobs.norms import (
    WIDTH,
    ByRunning,
    Clipped,
    Copies,
    Penalised,
    ReadsFirst,
    ReadsStatistics,
    Renorm,
    accumulated,
    assert_equal,
    chain,
    every_norm,
    script_of,
)
from tests.jobs.scripts import EQUAL, run_over_functions, run_script, worst_difference


@pytest.mark.parametrize(("stages", "replicas", "recompute"), [(2, 1, True), (3, 2, False)])
def test_statistics_of_every_norm(stages: int, replicas: int, recompute: bool) -> None:
    assert_equal(script_of(every_norm), stages=stages, replicas=replicas, recompute=recompute)


def test_one_replica_computes_statistics_in_the_order_of_a_script() -> None:
    script = script_of(lambda: chain(nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)))
    found, expected = run_over_functions(script, schedule=ScheduleKind.ONE_F_ONE_B), accumulated(script)
    assert all(torch.equal(found[name], buffer) for name, buffer in expected.named_buffers() if name.startswith("0."))


def test_an_average_of_buffers_follows_those_that_a_forward_replaces() -> None:
    norm = nn.BatchNorm1d(2)
    average = WeightAverage(EMA(decay=0.5, use_buffers=True), norm)
    average.update(1)
    norm.running_mean = torch.ones(2)
    average.update(2)
    state = average.added_to(capture_state(norm, None, GradientNorm()))
    assert state.tensors[AVERAGED + "running_mean"].tolist() == [0.5, 0.5]


READ: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "drift": (ReadsStatistics, r"drift = self\.norm"),
    "renormalised": (Renorm, r"running_std = "),
    "by running statistics": (lambda: ByRunning(WIDTH), r"return F\.batch_norm\(input, "),
    "copies": (Copies, r"self\.slow\.lerp_"),
    "clipped": (Clipped, r"0\.1 \(Clipped.*does not update as"),
}


@pytest.mark.parametrize("recompute", [False, True])
def test_statistics_that_a_forward_reads_are_those_of_a_script(recompute: bool) -> None:
    script = script_of(lambda: chain(*(make() for make, _ in READ.values())))
    assert_equal(script, stages=3, recompute=recompute, schedule=ScheduleKind.ONE_F_ONE_B)


@pytest.mark.parametrize("name", READ)
def test_statistics_that_a_forward_reads_are_refused_with_replicas(name: str) -> None:
    make, line = READ[name]
    with pytest.raises(PlanError, match=rf"0\.1.*running statistics.*{line}.*replicas=\(1,\).*GroupNorm"):
        run_over_functions(script_of(lambda: chain(make(), nn.BatchNorm1d(WIDTH))), stages=1, replicas=2)


def test_a_model_that_reads_all_its_statistics() -> None:
    with pytest.raises(PlanError, match=r"and 2 more \(running statistics.*square\(\).*replicas=\(1,\).*GroupNorm"):
        run_over_functions(script_of(Penalised), stages=1, replicas=2)
    assert_equal(script_of(Penalised), stages=1)


def test_statistics_are_read_where_the_code_reads_them() -> None:
    assert_equal(script_of(ReadsFirst), stages=2)


def test_norms_without_statistics_are_a_way_out() -> None:
    assert_equal(script_of(lambda: chain(nn.GroupNorm(2, WIDTH), nn.LayerNorm(WIDTH))), replicas=2)


def test_whole_batches_equal_a_script_on_whole_batches() -> None:
    script = replace(script_of(lambda: chain(ReadsStatistics(), Renorm())), micro_batch=16)
    worst, name = worst_difference(script, run_over_functions(script), run_script(script)[0])
    assert worst < EQUAL, name
