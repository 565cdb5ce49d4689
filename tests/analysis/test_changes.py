"""Each change has the price that the cost model gives the changed plan."""

from dataclasses import replace

import pytest

from funcpipe.analysis.improve import changes
from funcpipe.core import MB, Sync
from funcpipe.partitioner.cost.evaluate import evaluate
from tests.show.large import SIZE, SPEC, material

MADE = material()
assert MADE.plan is not None
assert MADE.profile is not None
PLAN, PROFILE = MADE.plan, MADE.profile


def test_changes_are_priced_as_the_changed_plan() -> None:
    found = {change.what: change for change in changes(PLAN, PROFILE, SPEC)}
    now, then = (evaluate(plan, PROFILE, SPEC) for plan in (PLAN, replace(PLAN, sync=Sync.STREAMED)))
    assert found["synchronisation streamed"].more_s == pytest.approx(then.iteration_s - now.iteration_s)
    assert found["synchronisation streamed"].more_usd == pytest.approx(then.cost_usd - now.cost_usd)
    assert found["activations in bf16"].numerics
    assert all(change.is_better for change in found.values())


def test_no_change_is_proposed_that_does_not_fit() -> None:
    tight = replace(PROFILE, base_memory_bytes=(SIZE.memory_mb - 400) * MB)
    smaller = [f"stage {i} on {size.name}" for i in (0, 1) for size in SPEC.sizes if size.memory_mb < SIZE.memory_mb]
    assert set(smaller) & {change.what for change in changes(PLAN, PROFILE, SPEC)}
    assert not set(smaller) & {change.what for change in changes(PLAN, tight, SPEC)}
