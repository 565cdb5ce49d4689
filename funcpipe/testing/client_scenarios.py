"""What always holds while clients of one run meet, and the scenarios in which that is explored.

The invariants are those of docs/running.md, "What always holds", by the same names.
"""

import functools
from collections.abc import Mapping, Sequence

from funcpipe.core import RunRecord
from funcpipe.errors import KeyMissing, RunHalted, RunTaken, RunUnknown, Superseded
from funcpipe.runstate.functions import list_functions
from funcpipe.runstate.generations import find_record, list_generations, newest_record
from funcpipe.runstate.keyring import signed
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.owner import BEAT_S
from funcpipe.testing.actors import Answered
from funcpipe.testing.client_races import LEFT, PLATFORM, RUN, Cleaning, Restarting, Training, clients, stopped
from funcpipe.testing.explored_world import World
from funcpipe.testing.interleaving import Invariant, Scenario

_KEYS = Keys(RUN)
_LEASES = _KEYS.owner.leases("client")


def _last_owner(world: World) -> str | None:
    """Whose lease is the newest."""
    newest = max((key for key in world.objects if key.startswith(_LEASES)), default="")
    for name in world.names:
        for request, answer in world.did(name):
            put = request.kind == "put" and request.key == newest and answer is None
            if put and request.data == world.objects[request.key]:
                return name
    return None


def _owner_asks(world: World) -> str | None:
    """By what the client itself has done: whoever asks gets no other answer later."""
    key, name = world.step.key, world.step.actor
    if world.step.what not in ("put", "delete") or not _is_fenced(key):
        return None
    before = list(world.history(name)[:-1])
    while before and before[-1].request.kind == world.step.what == "delete":  # one request for many
        before.pop()
    lease = _own_lease(before)
    if lease is None:
        return None
    looks = [asked for asked in before if asked.request.kind == "get" and asked.request.key == _lease(lease + 1)]
    has_asked = bool(looks) and looks[-1].answer is KeyMissing
    if has_asked and (before[-1].now_s - looks[-1].now_s <= BEAT_S or looks[-1:] == before[-2:-1]):
        return None
    return f"{name} changes {key} without asking whether it is still the owner"


def _own_lease(history: Sequence[Answered]) -> int | None:
    """The number of the newest lease that an actor has put."""
    puts = [asked.request.key for asked in history if asked.request.kind == "put" and asked.answer is None]
    numbers = [int(key.rpartition("/")[2]) for key in puts if key.startswith(_LEASES)]
    return numbers[-1] if numbers else None


def _lease(number: int) -> str:
    return _KEYS.owner.lease("client", number)


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
    history = world.history(name)
    own = [asked.request.data for asked in history if asked.request.kind == "put" and asked.request.key == key]
    newest = _own_lease(history)
    if world.step.before in own or (newest is not None and key < _lease(newest)):
        return None
    return f"{name} deletes the lease of another client"


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

ALWAYS = (OWNER_ASKS, OWNERS_RUN, GONE, KNOWN)
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
