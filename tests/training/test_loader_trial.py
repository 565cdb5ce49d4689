"""Processes that load are tried at home: they get the dataset and send batches back, or it is said what fails."""

import multiprocessing
import multiprocessing.process
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info

from funcpipe.client.prepare.job import Learner, SampleOrder, make_job
from funcpipe.core import RunSettings
from funcpipe.errors import DataError
from funcpipe.model.draws import generator_states
from funcpipe.model.graph import trace
from funcpipe.training.data_source import data_source
from funcpipe.training.first_batch import try_processes
from funcpipe.training.loading import whole_batch
from funcpipe.training.recipe import Recipe
from tests.e2e.plans import even_plan, momentum

Processes = set[multiprocessing.process.BaseProcess]
SIGNATURE = trace(nn.Linear(3, 2), (torch.zeros(2, 3),)).signature
HERE = os.getpid()
IN_CHILD: list[int] = []


class Noted(Dataset[Any]):
    """Samples whose target is what `note` returns for their number, where they are loaded."""

    def __init__(self, note: Callable[[int], Any]) -> None:
        self.note = note
        self.read: list[int] = []

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        self.read.append(index)
        return torch.rand(3), self.note(index)


def tried(note: Callable[[int], Any], **options: Any) -> Noted:
    dataset = Noted(note)
    loader = DataLoader(dataset, **{"num_workers": 2, "multiprocessing_context": "fork", **options})
    try_processes(data_source(loader), [range(2), range(6, 8)], seed=0, keep=whole_batch(SIGNATURE))
    return dataset


@pytest.fixture
def others() -> Processes:
    """The processes that other tests have started and keep."""
    return {*multiprocessing.active_children()}


def test_each_process_loads_as_the_user_says_and_nothing_changes_here(tmp_path: Path, others: Processes) -> None:
    def begin(number: int) -> None:
        info = get_worker_info()
        assert info is not None
        assert isinstance(info.dataset, Noted)
        IN_CHILD.append(number)

    def note(index: int) -> int:
        info = get_worker_info()
        assert info is not None
        (tmp_path / str(index)).write_text(f"{info.id} {IN_CHILD} {os.getpid() != HERE}")
        return index

    before = generator_states()
    dataset = tried(note, worker_init_fn=begin)
    assert generator_states() == before
    assert dataset.read == []
    assert IN_CHILD == []
    assert {*multiprocessing.active_children()} == others
    found = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert found == {"0": "0 [0] True", "1": "0 [0] True", "6": "1 [1] True", "7": "1 [1] True"}


def fails(number: int) -> None:
    if number == 1:
        raise OSError("no file for the second process")


def of_process(index: int) -> int:
    info = get_worker_info()
    return 1 // (1 - (0 if info is None else info.id))


def ends(index: int) -> int:
    os._exit(3)


@pytest.mark.parametrize(
    ("note", "options", "message"),
    [
        (of_process, {}, "num_workers=2, and a process that loads fails: ZeroDivisionError: integer division"),
        (int, {"worker_init_fn": fails}, "fails: OSError: no file for the second process; give a dataset, a collate_"),
        (ends, {}, r"fails: DataLoader worker \(pid\(s\) [\d, ]+\) exited unexpectedly"),
        (
            int,
            {"collate_fn": lambda samples: 3},
            "fails: DataError: the collate_fn returns a int; it must return a tuple",
        ),
        (
            lambda index: threading.Lock(),
            {"collate_fn": lambda samples: (torch.zeros(2, 3), [target for _, target in samples])},
            "fails: TypeError: cannot pickle '_thread.lock' object",
        ),
    ],
    ids=["of one process", "worker_init_fn", "exit", "no batch", "batch that stays there"],
)
def test_what_fails_there_is_said_here(
    note: Callable[[int], Any], options: dict[str, Any], message: str, others: Processes
) -> None:
    with pytest.raises(DataError, match=message):
        tried(note, **options)
    assert {*multiprocessing.active_children()} == others


def test_a_job_and_a_validation_are_refused_before_functions_start() -> None:
    model = nn.Linear(3, 2)
    plan = even_plan(model, (torch.zeros(2, 3),), stages=1, replicas=1, micro_batch=2, micro_batches=2)
    learner = Learner(model=model, recipe=Recipe(loss=F.cross_entropy, optimizer=momentum))
    good, bad = (
        DataLoader(Noted(lambda index: index % 2), num_workers=1, multiprocessing_context="fork", worker_init_fn=begin)
        for begin in (None, lambda number: fails(1))
    )
    make_job(learner, good, plan, SampleOrder(), RunSettings(), good)
    for train, held_out in ((bad, good), (good, bad)):
        with pytest.raises(DataError, match="num_workers=1, and a process that loads fails: OSError: no file for"):
            make_job(learner, train, plan, SampleOrder(), RunSettings(), held_out)
    tensors = TensorDataset(torch.rand(8, 3), torch.arange(8) % 2)
    loader = DataLoader(tensors, num_workers=1, worker_init_fn=lambda number: fails(1))
    make_job(learner, loader, plan, SampleOrder(), RunSettings(), loader)  # loaded in threads
