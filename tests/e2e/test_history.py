"""A run on local functions files what it took, and the next plan is shown with it."""

from pathlib import Path

import pytest
from torch.nn import functional as F

from funcpipe.api import FuncPipe
from funcpipe.core import Quantity
from funcpipe.neighbours.history.journal import read_history
from funcpipe.neighbours.history.learned import as_observed
from tests.e2e import small


def test_a_run_is_filed_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUNCPIPE_HISTORY", str(tmp_path / "history.jsonl"))
    pipe = FuncPipe(small.model(), loss_fn=F.cross_entropy, optimizer=small.optimizer)
    profile = pipe.profile(small.sample(), platform="local", micro_batch=2, repeats=2)
    plan = pipe.optimize(global_batch=8, replicas=2, profile=profile)
    job = pipe.estimate(small.data, plan=plan)
    result = pipe.train(small.data, plan=plan)
    assert job.cost_usd / 4 < result.bill.cost_usd < job.cost_usd * 4
    found = read_history()
    assert {one.quantity for one in found} >= {Quantity.COMPUTE, Quantity.START_UP, Quantity.ITERATION}
    assert {(one.run, one.platform, one.ran_on, one.model) for one in found} == {
        (result.run, "local", "local", plan.model)
    }
    assert all(one.observed_s > 0 and one.predicted_s > 0 for one in found)
    here = as_observed(plan, found)
    assert here is not None
    (iteration,) = [one for one in found if one.quantity is Quantity.ITERATION]
    assert min(iteration.observed_s, here.modelled_s) <= here.observed_s <= max(iteration.observed_s, here.modelled_s)
