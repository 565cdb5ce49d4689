"""`FuncPipe.provision`: the same table as for the profile alone."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from funcpipe import FuncPipe, JobSpec, PlanError, provision_table
from tests.neighbours.provisioning.test_compare import profile

WAYS = ("one-machine", "funcpipe")


def pipe() -> FuncPipe:
    return FuncPipe(
        nn.Linear(4, 2),
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )


def test_a_module_s_job_is_that_of_its_profile() -> None:
    found = pipe().provision(20_000, global_batch=64, epochs=2, deadline_s=3600, ways=WAYS, profile=profile())
    job = JobSpec(samples=20_000, global_batch=64, epochs=2, deadline_s=3600)
    assert found.recommended == provision_table(profile(), job, ways=WAYS).recommended
    assert [one.way for one in found.provisions] == [
        one.way for one in provision_table(profile(), job, ways=WAYS).provisions
    ]


def test_samples_of_a_dataset_are_counted() -> None:
    data = TensorDataset(torch.zeros(640, 4), torch.zeros(640, 2))
    found = pipe().provision(data, global_batch=64, epochs=3, ways=("one-machine",), profile=profile())
    assert found.job.samples == 640
    assert found.provisions[0].iterations == pytest.approx(30)


def test_without_a_profile_it_says_what_is_missing() -> None:
    with pytest.raises(PlanError, match="there is no profile yet"):
        pipe().provision(64, global_batch=64, epochs=1)
