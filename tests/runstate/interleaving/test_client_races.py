"""What always holds while clients of one run meet at its storage: in all orders, within bounds."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from funcpipe.client.control import stopping as control
from funcpipe.core import LeaseDocument, RunRecord
from funcpipe.errors import RunUnknown
from funcpipe.platforms.base import Storage
from funcpipe.runstate import owner
from funcpipe.runstate.documents import put_document
from funcpipe.runstate.functions import start_function
from funcpipe.runstate.generations import find_record, list_generations
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.owner import Owner, OwnerLease
from funcpipe.worker import peer_recovery
from tests.support import client_scenarios as meetings
from tests.support.client_races import clients
from tests.support.interleaving import Invariant, Scenario, explore


def told(scenario: Scenario) -> str:
    return scenario.name.replace(" ", "_")


@pytest.mark.parametrize(
    "scenario",
    [replace(each, switches=1) for each in meetings.SCENARIOS],
    ids=told,
)
def test_what_always_holds_in_one_switch(scenario: Scenario) -> None:
    found = explore(scenario)
    assert found.violations == ()
    assert found.interleavings >= 40


@pytest.mark.long
@pytest.mark.parametrize("scenario", meetings.SCENARIOS, ids=told)
def test_what_always_holds(scenario: Scenario) -> None:
    assert explore(scenario).violations == ()


def take_at_once(lease: OwnerLease) -> None:
    """Become an owner without a look at who else wants to be."""
    put_document(lease._storage, lease.key, LeaseDocument(holder=lease.token))
    lease.taken = True


def delete_what_is_there(held: Owner) -> None:
    """Delete what owners have said and their leases, as they are found after the last look."""
    held.check_now()
    held._gone = True
    for key in held._raw.list(held._keys.prefix):
        held._raw.delete(key)


def any_record(storage: Storage, run: str) -> RunRecord:
    """The record of the newest generation, even if that was deleted, which counts before another of its number."""
    found = [(keys, find_record(storage, keys)) for keys in list_generations(storage, run)]
    left = storage.list(Keys(run).reservations)
    records = [((keys.generation, keys.reservation not in left), record) for keys, record in found if record]
    if not records:
        raise RunUnknown(run)
    return max(records, key=lambda each: each[0])[1]


def keeping_payloads(storage: Any, keys: Any, open_platform: Any, *, for_good: bool = False) -> None:
    """The end of functions, of which those that start functions do not hear."""
    end_functions(storage, keys, open_platform)


end_functions = control.end_functions


@pytest.mark.parametrize(
    ("scenario", "where", "name", "planted", "broken"),
    [
        (
            replace(meetings.TAKE_OVER, switches=1),
            owner,
            "_OwnersStorage",
            lambda storage, _: storage,
            meetings.OWNER_ASKS,
        ),
        (meetings.DETACH, OwnerLease, "take", take_at_once, meetings.ONE_BEGINS),
        (replace(meetings.TAKE_OVER, switches=1), Owner, "_delete_own", delete_what_is_there, meetings.LEASE_STAYS),
        (replace(meetings.TAKE_OVER, switches=1), meetings, "newest_record", any_record, meetings.OWNERS_RUN),
        (meetings.RESTART, peer_recovery, "start_for_worker", start_function, meetings.KNOWN),
        (meetings.RESTART, control, "end_functions", keeping_payloads, meetings.KNOWN),
    ],
    ids=[
        "an owner without a fence",
        "an owner that does not look who else wants to be",
        "an owner that deletes leases that it has not looked at",
        "a record that counts although its generation is gone",
        "a watchdog that does not look again",
        "a client that keeps the payloads",
    ],
)
def test_a_planted_mistake_is_found(
    scenario: Scenario, where: object, name: str, planted: object, broken: Invariant
) -> None:
    @contextlib.contextmanager
    def mistaken() -> Iterator[None]:
        with clients(), mock.patch.object(where, name, planted):
            yield

    found = explore(replace(scenario, setting=mistaken, invariants=(broken,)), until_violation=True)
    assert broken.name in {violation.invariant for violation in found.violations}, found
