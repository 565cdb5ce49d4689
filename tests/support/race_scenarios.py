"""What always holds while functions and clients of a run meet, and the scenarios in which that is explored.

The invariants are those of docs/architecture.md, "What always holds", by the same names.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from funcpipe.errors import Superseded
from funcpipe.runstate.checkpoint_index import CheckpointIndex
from funcpipe.runstate.checkpoints import Checkpoints
from tests.support.explored_world import World
from tests.support.interleaving import Invariant, Scenario
from tests.support.races import (
    FIRST,
    KEYS,
    SECOND,
    Failing,
    Function,
    collector,
    handing_over,
    obeying,
    peer,
    publishing_late,
    trained,
    value_after,
    value_in,
)
from tests.support.run_keys import signed_for_tests

_MESSAGE = re.compile(rf"{KEYS.messages('s0.r0')}(\d+)/")


def _becomes_worker_once(world: World) -> str | None:
    """By what each has done: who has put its lease and written anything else since."""
    if world.step.what != "put" or world.step.error:
        return None
    holders: dict[str, set[str]] = {}
    for name in world.names:
        done = [request.key for request, answer in world.did(name) if request.kind == "put" and answer is None]
        leases = [key for key in done if "/leases/" in key]
        if leases and len(done) > len(leases):
            holders.setdefault(leases[0], set()).add(name)
    twice = [f"{key} is held by {', '.join(sorted(names))}" for key, names in holders.items() if len(names) > 1]
    return twice[0] if twice else None


def _message_never_changes(world: World) -> str | None:
    found = _MESSAGE.match(world.step.key) if world.step.what == "put" else None
    if found is None or world.step.after == str(value_after(int(found[1]) + 1)).encode():
        return None
    return f"{world.step.key} holds {world.step.after!r}"


@functools.lru_cache(maxsize=4096)
def _damaged_checkpoint(objects: frozenset[tuple[str, bytes]]) -> str | None:
    checkpoints = Checkpoints(signed_for_tests(World.reader(dict(objects))), KEYS)
    for stage, entries in checkpoints.index().saved.items():
        for step, name in entries:
            if value_in(checkpoints.load(stage, name)) != value_after(step):
                return f"{name} of stage {stage} holds something else"
    return None


def _checkpoint_is_whole(world: World) -> str | None:
    if "/checkpoints/" not in world.step.key or world.step.before == world.step.after:
        return None
    return _damaged_checkpoint(frozenset(item for item in world.objects.items() if "/checkpoints/" in item[0]))


def _found_by_a_restart(objects: Mapping[str, bytes]) -> CheckpointIndex:
    """What an attempt would find that took over the marks of all before it now."""
    taken_over = {re.sub(r"(/progress/.*/)\d+\.\d+", r"\g<1>99999999.0000", key): data for key, data in objects.items()}
    return Checkpoints(signed_for_tests(World.reader(taken_over)), KEYS).index()


def _restart_never_goes_back(world: World) -> str | None:
    if world.step.before == world.step.after or not re.search("/(checkpoints|progress)/", world.step.key):
        return None
    before, now = (_found_by_a_restart(held) for held in (world.before, world.objects))
    for worker in (FIRST, SECOND):
        if now.restart_step(worker) < before.restart_step(worker):
            return f"{worker} restarts at {now.restart_step(worker)}, no longer at {before.restart_step(worker)}"
    return None


def _wanted_message_stays(world: World) -> str | None:
    found = _MESSAGE.match(world.step.key) if world.step.what == "delete" else None
    if found is None or _found_by_a_restart(world.objects).restart_step(SECOND) > int(found[1]):
        return None
    return f"{world.step.key} is deleted, and its reader would restart before it"


def _superseded_is_not_believed(world: World) -> str | None:
    if not world.is_over or world.results.get("other") != "obeys":
        return None
    believed = isinstance(world.results.get("new"), Superseded)
    return None if believed else "the run ends by the word of an attempt that has a successor"


def _somebody_goes_on(world: World) -> str | None:
    if not world.is_over or world.dead:
        return None
    finished = [name for name, result in world.results.items() if str(result).startswith("finished")]
    return None if len(finished) == 1 else f"{finished} have finished"


ONE_HOLDER = Invariant("one function is an attempt", _becomes_worker_once)
SAME_MESSAGE = Invariant("a message never changes", _message_never_changes)
WHOLE_CHECKPOINT = Invariant("a checkpoint that counts is whole", _checkpoint_is_whole)
NEVER_BACK = Invariant("a restart never goes back", _restart_never_goes_back)
MESSAGE_STAYS = Invariant("a message stays while a restart wants it", _wanted_message_stays)
NOT_BELIEVED = Invariant("a superseded attempt is not believed", _superseded_is_not_believed)
GOES_ON = Invariant("one attempt finishes", _somebody_goes_on)

STORED = (ONE_HOLDER, SAME_MESSAGE, WHOLE_CHECKPOINT, NEVER_BACK, MESSAGE_STAYS)
"""What holds of what is stored, in every scenario."""


def scenario(
    name: str,
    actors: dict[str, object],
    *more: Invariant,
    first: int = 1,
    second: int = 1,
    marked: int = 0,
    **bounds: Any,
) -> Scenario:
    """What `actors` do after the workers have done and saved `first` and `second` steps; see `trained`."""
    return Scenario(
        name=name,
        actors=actors,  # type: ignore[arg-type]
        invariants=(*STORED, *more),
        objects=trained(first, second, marked),
        errors=(Superseded,),
        **bounds,
    )


SAME_ATTEMPT = scenario(
    "three functions take one attempt", {f"function {n}": Function(FIRST, 1, 2) for n in range(3)}, switches=4
)
ZOMBIE = scenario(
    "a successor meets the attempt before",
    {"old": Function(FIRST, 1, 2, reports=True), "new": Function(FIRST, 2, 2, reports=True)},
    GOES_ON,
)
DYING = replace(ZOMBIE, name="one of two attempts dies, and time passes", deaths=1, pauses=1, switches=1)
ORDERS = scenario(
    "an attempt that fails has a successor",
    {"old": Failing(1), "new": Function(FIRST, 2, 2), "other": obeying},
    NOT_BELIEVED,
)
HAND_OVER = scenario(
    "a hand-over meets a restart by a peer",
    {"old": handing_over, "new": Function(FIRST, 1, 3, reports=True, waits=True), "peer": peer},
    GOES_ON,
    switches=2,
)
COLLECTION = scenario(
    "messages and checkpoints are deleted while their reader restarts",
    {"old": Function(SECOND, 1, 2), "new": Function(SECOND, 2, 2), "collector": collector},
    first=3,
    switches=4,
)
LATE = scenario(
    "a checkpoint is published while a replica repeats the steps before it",
    {"new": Function(SECOND, 1, 3), "saver": publishing_late, "collector": collector},
    GOES_ON,
    first=3,
    marked=3,
    switches=3,
    deaths=1,
)
LATE_AGAIN = scenario(
    "a checkpoint is published while two attempts of a replica repeat the steps before it",
    {
        "old": Function(SECOND, 1, 3),
        "new": Function(SECOND, 2, 3),
        "saver": publishing_late,
        "collector": collector,
    },
    first=3,
    marked=3,
    switches=2,
)
SCENARIOS = (SAME_ATTEMPT, ZOMBIE, DYING, ORDERS, HAND_OVER, COLLECTION, LATE, LATE_AGAIN)
