"""Data that cannot be trained on is refused before anything starts, whatever the user's code raises."""

import dataclasses
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from funcpipe import DataError, data
from funcpipe.client.prepare.data import open_data
from funcpipe.client.prepare.job import Learner, SampleOrder, make_job
from funcpipe.client.prepare.profiling import profile_data
from funcpipe.core import RunSettings
from funcpipe.training.data import MeteredFactory
from funcpipe.training.recipe import Recipe
from tests.e2e import small
from tests.support.shard_files import CLASSES, write_mds

LEARNER = Learner(model=small.model(), recipe=Recipe(loss=nn.functional.cross_entropy, optimizer=small.optimizer))


def unreadable() -> Any:
    raise OSError("no such disk")


class Lies:
    """Says that it has more samples than it has."""

    def __init__(self, samples: int) -> None:
        self._samples = small.data()[:samples]

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._samples[index]


def bad_collate(samples: list[Any]) -> Any:
    raise KeyError("image")


def loaded_by(collate: Callable[[list[Any]], Any]) -> DataLoader[Any]:
    return DataLoader(small.data(), collate_fn=collate)  # type: ignore[arg-type]


MISTAKES: dict[str, tuple[Any, str]] = {
    "none": (lambda: None, "the data is None; give a dataset, or a factory"),
    "raises": (unreadable, "the factory of the data, called without arguments, fails: OSError: no such disk"),
    "arguments": (lambda path: small.data(), r"fails: TypeError: .* missing 1 required positional argument: 'path'"),
    "empty": (list, "the dataset, a list, has no samples; give one with at least a global batch of them"),
    "no sample": (partial(Lies, 0), "sample 0 of the dataset, which has 64, cannot be read: IndexError: list index"),
    "too few": (partial(Lies, 40), "sample 63 of the dataset, which has 64, cannot be read: IndexError: list index"),
    "no target": (lambda: [(torch.zeros(4), None)] * 64, "samples 0, 1 of the dataset cannot be .*NoneType.*; return"),
    "collate": (partial(loaded_by, bad_collate), "the collate_fn fails on samples 0, 1 of the dataset: KeyError: 'ima"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_training_is_refused_with_fact_and_way_out(mistake: str) -> None:
    given, message = MISTAKES[mistake]
    with pytest.raises(DataError, match=message):
        make_job(LEARNER, given, small.plan(), SampleOrder(), RunSettings())


@pytest.mark.parametrize("mistake", ["none", "raises", "empty"])
def test_profiles_are_refused_likewise(mistake: str) -> None:
    given, message = MISTAKES[mistake]
    with pytest.raises(DataError, match=message):
        profile_data(given, 2)


def test_a_sample_that_cannot_be_read_is_no_profile() -> None:
    with pytest.raises(DataError, match="samples 0 to 1 of the dataset cannot be loaded: IndexError"):
        profile_data(Lies(0), 2)


class Locked(Dataset[Any]):
    """Cannot be given to another process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return small.data()[index]


def test_what_cannot_be_given_to_processes_that_load_is_refused_here() -> None:
    message = r"num_workers, but its {} cannot be given to processes: TypeError: cannot pickle '_th.*out num_workers"
    with pytest.raises(DataError, match=message.format("dataset")):
        open_data(lambda: DataLoader(Locked(), num_workers=2))
    with pytest.raises(DataError, match=message.format("worker_init_fn")):
        open_data(DataLoader(small.data(), num_workers=1, worker_init_fn=Locked().__getitem__))  # type: ignore[arg-type]
    assert len(open_data(lambda: DataLoader(Locked()))[1].dataset) == 64
    assert dataclasses.asdict(open_data(DataLoader(small.data(), num_workers=2))[1].options)["workers"] == 2  # type: ignore[arg-type]


def test_a_factory_may_return_what_can_be_given_itself(tmp_path: Path) -> None:
    """Data in object storage with a transform, for one; its index travels to functions, as if it was given itself."""
    write_mds(tmp_path, 12, 4)
    url = tmp_path.as_uri()
    shards = partial(data.mds, url, transform=lambda sample: (sample["y"],))
    for given in (shards, lambda: url):
        factory, source = open_data(given)
        write_mds(tmp_path, 8, 4)  # which later readers find, and this one does not
        assert isinstance(factory, MeteredFactory)
        assert len(factory()) == len(source.dataset) == 12
        y = factory()[4]
        assert (y["y"] if isinstance(y, dict) else y) == ((4 % CLASSES,) if given is shards else 4 % CLASSES)
        write_mds(tmp_path, 12, 4)
    factory, _ = open_data(lambda: loaded_by(torch.stack))
    assert len(factory()) == 64


def test_a_factory_that_returns_another_one_of_the_user_is_refused() -> None:
    def again() -> Any:
        return again

    with pytest.raises(DataError, match=r"the factory of the data returns another one, again; return .* again\(\)"):
        open_data(again)
