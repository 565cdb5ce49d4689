"""What error messages of runs claim, and what they advise: for tests that do as they are told."""

import random
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, TypeVar

from torch import Tensor

from funcpipe.core.settings import WHY_GONE
from funcpipe.errors import FuncPipeError


class Wrong(Exception):
    """The run has ended as none may."""


class Left(Protocol):
    """What a run has left: a Left, or what another process has told of one."""

    @property
    def losses(self) -> tuple[float, ...]: ...
    def state_dict(self) -> Mapping[str, Tensor]: ...


class World(Protocol):
    """A run under attack: what clients may do to it, and what there is of it.

    `errors` are what clients were told, `did` what was done because of that or by others, and `happened` what the
    storage and the folders have done.
    """

    name: str
    did: list[str]
    errors: list[str]
    draw: random.Random
    keeps_model: bool

    @property
    def happened(self) -> set[str]: ...
    def let_happen(self, attacks: Collection[str]) -> None: ...
    def begin(self) -> Left: ...
    def slept(self, note: Callable[[FuncPipeError], None]) -> Left: ...
    def resume(self, *, take_over: bool = False, from_start: bool = False) -> Left: ...
    def clean(self, *, take_over: bool = False) -> None: ...
    def stop(self) -> None: ...
    def status(self) -> None: ...
    def set_keys(self) -> None: ...
    def becomes(self, **changes: Any) -> None: ...
    def heal(self) -> None: ...
    def own(self) -> list[str]: ...
    def check_left(self) -> None: ...


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
        lambda happened: (
            _if("expire", "read late", "listed late")(happened) or _by_other("clean", "over", "resume")(happened)
        ),
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
    happened = world.happened | {done for done in world.did if done.startswith("another: ")}
    for claim, holds in CLAIMS:
        if re.search(claim, said) and not holds(happened):
            raise Wrong(f"says what is not so: {said.splitlines()[0]}")


def mend(world: World, error: FuncPipeError) -> None:
    """Do what `error` advises, by which a run was refused before it began. Raises Wrong if it advises nothing."""
    name, do = _advised(error, MENDS)
    world.did.append(name)
    do(world)


def is_refusal(error: FuncPipeError) -> bool:
    """Whether `error` refuses to begin a run, and says what to change; others end one."""
    return error.exit_code == 2 and any(re.search(pattern, _said(error)) for pattern, *_ in MENDS)


def follow(world: World, error: FuncPipeError) -> Left:
    """Do what `error` advises, and what each error after it does, until the run has trained. Raises Wrong."""
    for _ in range(_MOST):
        name, do = _advised(error, ADVICE)
        world.did.append(name)
        try:
            return do(world)
        except FuncPipeError as caught:
            say(world, caught)
            error = caught
        world.heal()
    raise Wrong(f"advice leads nowhere: {type(error).__name__}: {error}")


def _advised(
    error: FuncPipeError, advice: tuple[tuple[str, str, Callable[[World], Done]], ...]
) -> tuple[str, Callable[[World], Done]]:
    said = _said(error)
    for pattern, name, do in advice:
        if re.search(pattern, said):
            return name, do
    raise Wrong(f"advises nothing: {type(error).__name__}: {error}")


def _said(error: FuncPipeError) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def _rename(world: World) -> None:
    world.name = f"{world.name}-again"


def _clean(world: World) -> None:
    world.clean()


def _begin(world: World) -> Left:
    return world.begin()


def _after(first: Callable[[World], None], then: Callable[[World], Left]) -> Callable[[World], Left]:
    def both(world: World) -> Left:
        first(world)
        return then(world)

    return both


MENDS: tuple[tuple[str, str, Callable[[World], None]], ...] = (
    (r"set FUNCPIPE_KEY_DIR", "set FUNCPIPE_KEY_DIR", lambda world: world.set_keys()),
    (r"must be a name of its own", "another name", _rename),
    (r"take a server that heeds", "another server", lambda world: world.becomes(ignores_conditions=False)),
    (r"take a storage whose", "another storage", lambda world: world.becomes(late_s=0.0)),
    (r"storage must be a folder that can be written", "another folder", lambda world: world.becomes(has_folder=True)),
)
"""What is advised before a run has begun, by what a message says; the first that fits."""

ADVICE: tuple[tuple[str, str, Callable[[World], Left]], ...] = (
    *((pattern, name, _after(do, _begin)) for pattern, name, do in MENDS),
    (r"funcpipe run clean \S+\), and (start a new one|train again)", "clean, train", _after(_clean, _begin)),
    (r"(?s)key of run .* is not on this machine", "clean, train", _after(_clean, _begin)),
    (r"funcpipe run clean \S+ deletes what is left", "clean, train", _after(_clean, _begin)),
    (r"give the command again", "clean, train", _after(_clean, _begin)),
    (r"--from-start", "--resume --from-start", lambda world: world.resume(from_start=True)),
    (r"--take-over", "--resume --take-over", lambda world: world.resume(take_over=True)),
    (r"the same command begins it|begins it anew|there is no run", "train", _begin),
    (r"--resume|resume it", "--resume", lambda world: world.resume()),
)
"""What is advised, by what a message says or notes; the first that fits."""


def other_acts(world: World, note: Callable[[FuncPipeError], None]) -> Left | None:
    """Let another client do something to the run, while the first one sleeps; what it has trained, if it has."""
    verb = world.draw.choice(list(_OTHERS))
    world.did.append(f"another: {verb}")
    try:
        return _OTHERS[verb](world)
    except FuncPipeError as error:
        note(error)
        return None


def _clean_anyway(world: World) -> None:
    world.clean(take_over=True)


def _stop(world: World) -> None:
    world.stop()


def _status(world: World) -> None:
    world.status()


_OTHERS: dict[str, Callable[[World], Left | None]] = {
    "resume": lambda world: world.resume(),
    "take over": lambda world: world.resume(take_over=True),
    "clean": _clean,
    "clean, take over": _clean_anyway,
    "clean, train": _after(_clean_anyway, _begin),
    "stop": _stop,
    "status": _status,
}
