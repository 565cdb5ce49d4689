"""What always holds while clients of one run meet, and the scenarios in which that is explored.

The invariants are those of docs/architecture.md, "What always holds", by the same names.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import cast

from funcpipe.core import RunRecord
from funcpipe.errors import KeyMissing, RunHalted, RunTaken, RunUnknown, Superseded
from funcpipe.runstate.functions import list_functions
from funcpipe.runstate.generations import find_record, list_generations, newest_record
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.owner import BEAT_S
from funcpipe.runstate.signing import signed
from tests.support.actors import Answered
from tests.support.client_races import LEFT, PLATFORM, RUN, Cleaning, Restarting, Training, clients, stopped
from tests.support.explored_world import World
from tests.support.interleaving import Invariant, Scenario

_KEYS = Keys(RUN)
_LEASES = _KEYS.owner.owner_leases


def _number(lease: str) -> int:
    """The number of the lease of that key."""
    return int(lease.removeprefix(_LEASES).partition(".")[0])


def _last_owner(world: World) -> str | None:
    """Whose lease is the newest."""
    newest = max((key for key in world.objects if key.startswith(_LEASES)), key=_number, default="")
    return next((name for name in world.names if newest in _own_leases(world.history(name))), None)


def _owner_asks(world: World) -> str | None:
    """By what the client itself has done: whoever asks gets no other answer later."""
    key, name = world.step.key, world.step.actor
    if world.step.what not in ("put", "delete") or not _is_fenced(key):
        return None
    before = list(world.history(name)[:-1])
    while before and before[-1].request.kind == world.step.what == "delete":  # one request for many
        before.pop()
    leases = _own_leases(before)
    if not leases:
        return None
    looks = [asked for asked in before if asked.request.kind == "list" and asked.request.key == _LEASES]
    has_asked = bool(looks) and _is_newest(leases[-1], looks[-1])
    if has_asked and (before[-1].now_s - looks[-1].now_s <= BEAT_S or looks[-1:] == before[-2:-1]):
        return None
    return f"{name} changes {key} without asking whether it is still the owner"


def _own_leases(history: Sequence[Answered]) -> list[str]:
    """The keys of the leases that an actor has put."""
    puts = [asked.request.key for asked in history if asked.request.kind == "put" and asked.answer is None]
    return [key for key in puts if key.startswith(_LEASES)]


def _is_newest(lease: str, look: Answered) -> bool:
    """Whether `look`, a list of all leases, found this one and none that is newer."""
    found = cast(tuple[str, ...], look.answer)
    return lease in found and max(map(_number, found)) == _number(lease)


def _is_fenced(key: str) -> bool:
    """Whether only the owner changes what is there."""
    return key.startswith(_KEYS.run_prefix) and not key.startswith(_KEYS.owner.prefix) and "/halts/" not in key


def _run_is_its_owners(world: World) -> str | None:
    if not world.is_over:
        return None
    owner = _last_owner(world)
    if owner is None or world.results[owner] != LEFT:
        return None
    record = newest_record(signed(world.storage), RUN)
    if record.storage != f"memory://{owner}":
        return f"{owner} owns the run, and its record is that of {record.storage}"
    gone = [key for key in (*_parts(record), f"{PLATFORM}{owner}.0") if key not in world.objects]
    return f"{owner} owns the run, of which {gone[0]} is gone" if gone else None


def _parts(record: RunRecord) -> tuple[str, ...]:
    """The keys without which a run cannot go on."""
    keys = Keys.of(record)
    return keys.reservation, keys.record, keys.record_copy, keys.bundle(0), keys.parameters(0), keys.payload("s0.r0")


def _one_has_begun(world: World) -> str | None:
    if not world.is_over:
        return None
    begun = [name for name, result in world.results.items() if result == LEFT]
    return f"{' and '.join(begun)} have left the run to itself" if len(begun) > 1 else None


def _deleted_is_gone(world: World) -> str | None:
    if not world.is_over or any(key.startswith(_LEASES) for key in world.objects):
        return None
    try:
        record = newest_record(signed(world.storage), RUN)
    except RunUnknown:
        lost = {name for name, result in world.results.items() if isinstance(result, Exception)}
        left = [key for key in sorted(world.objects) if not _written_by(world, key) & lost]
        return f"{left[0]} is left of a deleted run" if left else None
    whole = all(key in world.objects for key in _parts(record))
    return None if whole else "a run that was deleted counts"


def _written_by(world: World, key: str) -> set[str]:
    return {
        name
        for name in world.names
        if any(request.kind == "put" and request.key == key and answer is None for request, answer in world.did(name))
    }


def _lease_stays(world: World) -> str | None:
    key, name = world.step.key, world.step.actor
    if world.step.what != "delete" or not key.startswith(_LEASES) or world.step.before is None:
        return None
    own = _own_leases(world.history(name))
    if key in own or (own and _number(key) < _number(own[-1])):
        return None
    holders = [other for other in world.names if key in _own_leases(world.history(other))]
    if not any(_has_taken(key, world.history(holder)) for holder in holders):
        return None
    return f"{name} deletes the lease of another client"


def _has_taken(lease: str, history: Sequence[Answered]) -> bool:
    """Whether the client that put this lease has looked since, and has found no other of its number."""
    put = next(index for index, asked in enumerate(history) if asked.request.key == lease)
    looks = [asked for asked in history[put:] if asked.request.kind == "list" and asked.request.key == _LEASES]
    return bool(looks) and [_number(key) for key in cast(tuple[str, ...], looks[0].answer)].count(_number(lease)) == 1


@functools.lru_cache(maxsize=4096)
def _unknown_function(objects: frozenset[tuple[str, bytes]]) -> str | None:
    storage = signed(World.reader(dict(objects)))
    known = {
        f"{PLATFORM}{function.handle.name}"
        for keys in list_generations(storage, RUN)
        if find_record(storage, keys) is not None
        for function in list_functions(storage, keys)
    }
    unknown = sorted(key for key, _ in objects if key.startswith(PLATFORM) and key not in known)
    return f"{unknown[0]} runs, and nobody knows of it" if unknown else None


def _functions_are_known(world: World) -> str | None:
    return _unknown_function(frozenset(world.objects.items())) if world.is_over else None


OWNER_ASKS = Invariant("only its owner changes a run", _owner_asks)
ONE_BEGINS = Invariant("one client begins a run", _one_has_begun)
OWNERS_RUN = Invariant("the run is its last owner's", _run_is_its_owners)
GONE = Invariant("of a deleted run nothing is left", _deleted_is_gone)
LEASE_STAYS = Invariant("nobody deletes a newer owner's lease", _lease_stays)
KNOWN = Invariant("no function runs unknown", _functions_are_known)

ALWAYS = (OWNER_ASKS, OWNERS_RUN, LEASE_STAYS, GONE, KNOWN)
"""What holds in every scenario of clients."""


def scenario(
    name: str,
    actors: Mapping[str, object],
    *more: Invariant,
    objects: Mapping[str, bytes] | None = None,
    beating: bool = False,
    switches: int = 2,
) -> Scenario:
    """What `actors` do to a run, of which the storage holds `objects`."""
    return Scenario(
        name=name,
        actors=actors,  # type: ignore[arg-type]
        invariants=(*ALWAYS, *more),
        objects=objects or {},
        errors=(RunTaken, RunHalted, RunUnknown, Superseded, KeyMissing),
        switches=switches,
        setting=functools.partial(clients, beating=beating),
    )


STOPPED, _LEFT_OVER = stopped()
START = scenario(
    "two clients start a run of one name",
    {"one": Training(), "two": Training()},
)
DETACH = scenario(
    "two clients start a run of one name, and leave it to itself",
    {"one": Training(detach=True), "two": Training(detach=True)},
    ONE_BEGINS,
)
WATCHED = scenario(
    "a client starts a run while the owner says that it is there",
    {"one": Training(), "two": Training()},
    beating=True,
    switches=1,
)
RESUME = scenario(
    "two clients resume a run",
    {"one": Training(STOPPED, detach=True), "two": Training(STOPPED, detach=True)},
    ONE_BEGINS,
    objects=_LEFT_OVER,
)
CLEAN = scenario(
    "a client resumes a run that another one deletes",
    {"one": Training(STOPPED, detach=True), "two": Cleaning()},
    objects=_LEFT_OVER,
)
TAKE_OVER = scenario(
    "a client takes a run over from its owner",
    {"one": Training(), "two": Training(detach=True, takes_over=True)},
)
CLEAN_OVER = scenario(
    "a client takes a run over, and deletes it",
    {"one": Training(), "two": Cleaning(takes_over=True)},
)
RESTART = scenario(
    "a function is restarted while the run is deleted",
    {"cleaner": Cleaning(), "watchdog": Restarting(STOPPED)},
    objects=_LEFT_OVER,
    switches=3,
)
THREE = scenario(
    "a function is restarted while one client resumes and one takes over",
    {
        "one": Training(STOPPED),
        "two": Cleaning(takes_over=True),
        "watchdog": Restarting(STOPPED),
    },
    objects=_LEFT_OVER,
    switches=1,
)
SCENARIOS = (START, DETACH, WATCHED, RESUME, CLEAN, TAKE_OVER, CLEAN_OVER, RESTART, THREE)
