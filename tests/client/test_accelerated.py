"""What functions with an accelerator do not train is refused before anything runs."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from funcpipe.core import Coupled, Plan, Precision
from funcpipe.errors import PlanError
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.training.averaging import EMA
from tests.e2e import small
from tests.e2e.plans import even_plan
from tests.in_process import make_job, prepared_run
from tests.training.test_warm_up import Counting

PLAN = small.plan()
REFUSED: dict[str, tuple[dict[str, Any], Plan]] = {
    "precision='fp16'": ({"precision": Precision.FP16}, PLAN),
    "an average": ({"average": EMA(decay=0.9)}, PLAN),
    "coupled='cache'": ({"coupled": Coupled.CACHE}, replace(PLAN, joint_loss=True)),
    "replicas that train alone": ({}, replace(PLAN, sync_every=4)),
}


def prepared(plan: Plan, model: nn.Module | None = None, *, accelerated: bool = True, **recipe: Any) -> MemoryStorage:
    storage = MemoryStorage()
    made, optimizer = model or small.model(), partial(torch.optim.SGD, lr=0.1)
    job = make_job(made, plan, small.data, loss=F.cross_entropy, optimizer=optimizer, **recipe)
    prepared_run(job, storage, accelerated=accelerated)
    return storage


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused_with_the_way_out(what: str) -> None:
    recipe, plan = REFUSED[what]
    with pytest.raises(PlanError, match=rf"do not train {what}.* yet, and stage 0 .*; train without, or plan with"):
        prepared(plan, **recipe)


def test_functions_without_an_accelerator_train_it() -> None:
    for recipe, plan in REFUSED.values():
        assert not prepared(plan, accelerated=False, **recipe).list("")


def test_so_are_modules_that_keep_more_than_tensors() -> None:
    model = nn.Sequential(Counting(), *small.model().children())
    plan = even_plan(model, small.sample(), stages=2, replicas=1, micro_batch=2, micro_batches=2)
    with pytest.raises(PlanError, match="do not train modules that keep more than tensors between their calls yet"):
        prepared(plan, model)
