"""What always holds while functions of a run meet at its storage: in all orders, within bounds."""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import pytest

from funcpipe.core import LeaseDocument, Outcome
from funcpipe.runstate.checkpoint_index import CheckpointIndex
from funcpipe.runstate.checkpoints import Checkpoints, UnpublishedCheckpoint
from funcpipe.runstate.documents import put_document
from funcpipe.runstate.lease import Lease
from tests.support import race_scenarios as races
from tests.support.actors import AskingStorage, Request, Value
from tests.support.interleaving import Invariant, Scenario, explore
from tests.support.race_scenarios import scenario
from tests.support.races import FIRST, Failing, Function, obeying

QUICK = [
    replace(races.SAME_ATTEMPT, switches=2),
    replace(races.ZOMBIE, switches=2),
    replace(races.ORDERS, switches=2),
    replace(races.HAND_OVER, switches=1),
    replace(races.COLLECTION, switches=2),
    replace(races.LATE, switches=1, deaths=0),
]


def told(scenario: Scenario) -> str:
    return scenario.name.replace(" ", "_")


@pytest.mark.parametrize("scenario", QUICK, ids=told)
def test_what_always_holds_in_few_switches(scenario: Scenario) -> None:
    found = explore(scenario)
    assert found.violations == ()
    assert found.interleavings > 100


@pytest.mark.long
@pytest.mark.parametrize("scenario", races.SCENARIOS, ids=told)
def test_what_always_holds(scenario: Scenario) -> None:
    assert explore(scenario).violations == ()


class TakesWhatIsTaken(Lease):
    """Becomes the worker without a condition."""

    def take(self) -> None:
        put_document(self._storage, self._keys.lease(self._worker, self._attempt), LeaseDocument(holder=self._holder))


class NeverAsks(Lease):
    """Does not see its successor."""

    def check_now(self) -> None:
        """All is well."""

    def close(self, ended: Outcome) -> None:
        """It is the last one."""


class ManifestFirst(Checkpoints):
    """Writes the manifest of a checkpoint before its files."""

    def write_files(self, stage: int, *arguments: Any, **options: Any) -> UnpublishedCheckpoint:
        storage, late = self._storage, []

        def ask(request: Request) -> Value:
            late.append(request)
            return None

        self._storage = AskingStorage(ask)
        written = super().write_files(stage, *arguments, **options)
        self._storage = storage
        put_document(storage, self._keys.checkpoint(stage, f"{written.name}.json"), written.manifest)
        for request in late:
            storage.put(request.key, request.data)
        return written


class FilesFirst(Checkpoints):
    """Deletes the files of a checkpoint before its manifest."""

    def delete(self, stage: int, names: Collection[str], index: CheckpointIndex) -> None:
        for name in names:
            self._storage.delete(self._keys.checkpoint(stage, name.replace(".json", ".0.safetensors")))
        super().delete(stage, names, index)


def takers(lease: Callable[..., Lease]) -> Scenario:
    return scenario("", {name: Function(FIRST, 1, 2, lease=lease) for name in "ab"})


def saving(checkpoints: Callable[..., Checkpoints]) -> Scenario:
    return scenario("", {"a": Function(FIRST, 1, 4, checkpoints=checkpoints)}, first=2, second=4)


def failing(lease: Callable[..., Lease]) -> Scenario:
    actors = {"old": Failing(1, lease=lease), "new": Function(FIRST, 2, 1), "other": obeying}
    return scenario("", actors, races.NOT_BELIEVED)


@pytest.mark.parametrize(
    ("planted", "broken"),
    [
        (takers(TakesWhatIsTaken), races.ONE_HOLDER),
        (failing(NeverAsks), races.NOT_BELIEVED),
        (saving(ManifestFirst), races.WHOLE_CHECKPOINT),
        (saving(FilesFirst), races.WHOLE_CHECKPOINT),
    ],
    ids=["a lease without a condition", "a lease that never asks", "the manifest first", "the files first"],
)
def test_a_planted_mistake_is_found(planted: Scenario, broken: Invariant) -> None:
    found = explore(planted, until_violation=True)
    assert broken.name in {violation.invariant for violation in found.violations}, found


@pytest.mark.parametrize("sound", [takers(Lease), saving(Checkpoints), failing(Lease)])
def test_without_the_mistake_all_is_well(sound: Scenario) -> None:
    assert explore(replace(sound, switches=3)).violations == ()
