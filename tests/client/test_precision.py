"""Whole runs in mixed precision: the same bits whether a function dies or not, near those of one process."""

import dataclasses
from collections.abc import Mapping

import pytest
import torch

from funcpipe.client.follow.launch import launch
from funcpipe.client.prepare.job import Job
from funcpipe.client.prepare.prepared_run import prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import Precision, RunSettings
from funcpipe.model.graph import trace
from funcpipe.platforms.catalog import load_spec
from funcpipe.testing.faults import FunctionFaults
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform
from funcpipe.training.plain import train_in_one_process
from tests.client.threads import RUN, STEADY, smaller_job
from tests.support import chaos


def job(precision: Precision) -> Job:
    graph = trace(chaos.model(), (torch.zeros(2, 6),), precision=precision)
    recipe = dataclasses.replace(smaller_job().recipe, precision=precision)
    return dataclasses.replace(smaller_job(), graph=graph, recipe=recipe, epochs=2)


def train(job: Job, dies: FunctionFaults | None = None) -> Mapping[str, torch.Tensor]:
    storage = MemoryStorage()
    functions = ThreadPlatform(
        load_spec("local"), storage, faults_of=lambda number: dies if dies and number == 2 else FunctionFaults()
    )
    session = session_on(Site(functions, storage, "memory://"), reopen=functions.open)
    result = launch(prepare(job, session, faults=STEADY, settings=RunSettings(name=RUN)))
    assert result.bill.functions == 4 + (dies is not None)
    return result.state_dict()


def recomputing(job: Job) -> Job:
    stages = tuple(dataclasses.replace(stage, recompute=True) for stage in job.plan.stages)
    return dataclasses.replace(job, plan=dataclasses.replace(job.plan, stages=stages))


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16])
def test_a_function_that_dies_and_recomputation_change_no_bit_and_one_process_gives_the_same(
    precision: Precision,
) -> None:
    chosen = job(precision)
    undisturbed = train(chosen)
    disturbed = train(recomputing(chosen), FunctionFaults(killed_writing=("/messages/", 9)))
    assert all(torch.equal(disturbed[name], tensor) for name, tensor in undisturbed.items())
    steps = [step for epoch in range(chosen.epochs) for step in chosen.batches.epoch(epoch)]
    plain = train_in_one_process(
        chaos.model(), chosen.graph, chaos.data(), steps, recipe=chosen.recipe, seed=chosen.seed
    )
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(undisturbed[name], tensor, rtol=0, atol=2e-3)
