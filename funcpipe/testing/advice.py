"""What error messages of runs claim, and what they advise: for tests that do as they are told."""

import re
from collections.abc import Callable, Collection
from typing import TypeVar

from funcpipe.client.results import RunResult
from funcpipe.core.lifetime import WHY_GONE
from funcpipe.errors import FuncPipeError
from funcpipe.testing.attacked_world import World, Wrong

_MOST = 6
"""A message whose advice leads to another message, and so on, so often leads nowhere."""

Done = TypeVar("Done")
"""What is done on an advice returns this."""

Holds = Callable[[Collection[str]], bool]


def _by_other(*verbs: str) -> Holds:
    return lambda happened: any(
        done.startswith("another: ") and any(verb in done for verb in verbs) for done in happened
    )


def _if(*words: str) -> Holds:
    return lambda happened: any(word in done for done in happened for word in words)


CLAIMS: tuple[tuple[str, Holds], ...] = (
    (r"another client", _by_other("resume", "take over", "clean", "train")),
    (
        f": {re.escape(WHY_GONE)}",
        lambda happened: _if("expire", "read late", "listed late")(happened) or _by_other("clean", "over")(happened),
    ),
    (r"as after os\._exit", lambda happened: False),
    (r"it was stopped", _by_other("stop")),
    (r"is truncated, damaged", _if("tore")),
    (r"conditional put must keep", _if("ignored a condition")),
    (r"reads of the storage lag", _if("read late")),
    (r"listings of the storage lag", _if("listed late")),
    (r"is not on this machine", _if("lost keys")),
    (r"Read-only", _if("refused to write")),
)
"""What a message may say only if it is so, by what the storage has done and what other clients did."""


def say(world: World, error: FuncPipeError) -> None:
    """Note an error. Raises Wrong for one that says what has not happened."""
    said = f"{type(error).__name__}: {error}"
    world.errors.append(said.splitlines()[0])
    happened = world.storage.happened | {done for done in world.did if done.startswith("another: ")}
    for claim, holds in CLAIMS:
        if re.search(claim, said) and not holds(happened):
            raise Wrong(f"says what is not so: {said.splitlines()[0]}")


def mend(world: World, error: FuncPipeError) -> None:
    """Do what `error` advises, by which a run was refused before it began. Raises Wrong if it advises nothing."""
    name, do = _advised(error, MENDS)
    world.did.append(name)
    do(world)


def follow(world: World, error: FuncPipeError) -> RunResult:
    """Do what `error` advises, and what each error after it does, until the run has trained. Raises Wrong."""
    for _ in range(_MOST):
        name, do = _advised(error, ADVICE)
        world.did.append(name)
        try:
            return do(world)
        except FuncPipeError as caught:
            say(world, caught)
            error = caught
        world.storage.heal()
    raise Wrong(f"advice leads nowhere: {type(error).__name__}: {error}")


def _advised(
    error: FuncPipeError, advice: tuple[tuple[str, str, Callable[[World], Done]], ...]
) -> tuple[str, Callable[[World], Done]]:
    said = "\n".join([str(error), *getattr(error, "__notes__", ())])
    for pattern, name, do in advice:
        if re.search(pattern, said):
            return name, do
    raise Wrong(f"advises nothing: {type(error).__name__}: {error}")


def _rename(world: World) -> None:
    world.name = f"{world.name}-again"


def _after(first: Callable[[World], None], then: Callable[[World], RunResult]) -> Callable[[World], RunResult]:
    def both(world: World) -> RunResult:
        first(world)
        return then(world)

    return both


MENDS: tuple[tuple[str, str, Callable[[World], None]], ...] = (
    (r"set FUNCPIPE_KEY_DIR", "set FUNCPIPE_KEY_DIR", World.set_keys),
    (r"must be a name of its own", "another name", _rename),
    (r"take a server that heeds", "another server", lambda world: world.storage.becomes(ignores_conditions=False)),
    (r"take a storage whose", "another storage", lambda world: world.storage.becomes(late_s=0.0)),
)
"""What is advised before a run has begun, by what a message says; the first that fits."""

ADVICE: tuple[tuple[str, str, Callable[[World], RunResult]], ...] = (
    *((pattern, name, _after(do, World.begin)) for pattern, name, do in MENDS),
    (r"funcpipe clean \S+\), and (start a new one|train again)", "clean, train", _after(World.clean, World.begin)),
    (r"(?s)key of run .* is not on this machine", "clean, train", _after(World.clean, World.begin)),
    (r"funcpipe clean \S+ deletes what is left", "clean, train", _after(World.clean, World.begin)),
    (r"--from-start", "--resume --from-start", lambda world: world.resume(from_start=True)),
    (r"--take-over", "--resume --take-over", lambda world: world.resume(take_over=True)),
    (r"there is no run", "train", World.begin),
    (r"--resume|resume it", "--resume", World.resume),
)
"""What is advised, by what a message says or notes; the first that fits."""
