"""Explores in which orders programs can meet at a storage: all orders, not by chance and sleeps.

Actors are ordinary functions. Before each request of theirs it is open whose request comes next, whether an actor dies
instead, or whether time passes; every choice is followed:

    s0 ─┬─ client 1: list ── s1 ─┬─ client 1: put ─── s3 …
        │                        └─ client 2: list ─┬ s4 …
        └─ client 2: list ── s2 ─── client 1: list ─┘

A state is what the storage holds, what each actor has asked and been answered, and the time. Actors depend on nothing
else, so that orders which lead to the same state go on alike: it is explored once. Checks may therefore look at the
state and at the step that led to it, but not at the order in which different actors came before.
"""

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

from funcpipe.core.texts import error_text
from funcpipe.errors import FuncPipeError
from tests.support.actors import (
    Actors,
    History,
    Program,
    Request,
    done,
    now_after,
)
from tests.support.explored_world import Step, World

DAMAGE = ("put", "delete")
"""Before which requests the death of an actor makes a difference."""

START_S = 1000.0
"""The time at which every exploration begins."""

MAX_STATES = 1_000_000
"""A scenario with more states needs narrower bounds, or never ends."""


ENDS = "every actor ends as it may"
"""The invariant that every scenario has."""


@dataclass(frozen=True, slots=True)
class Invariant:
    """What always holds: `broken` says of a world what is wrong there, or None."""

    name: str
    broken: Callable[[World], str | None]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Actors that meet at a storage that holds `objects`, and what must hold meanwhile.

    Actors end by themselves, or with one of `errors`. Up to `deaths` actors die, each at any point. Up to `pauses`
    times `pause_s` seconds pass, at any point. `switches` bounds how often an actor is left that could go on; None
    explores all orders. Actors run within `setting`.
    """

    name: str
    actors: Mapping[str, Program]
    invariants: tuple[Invariant, ...]
    objects: Mapping[str, bytes] = field(default_factory=dict)
    errors: tuple[type[Exception], ...] = ()
    deaths: int = 0
    pauses: int = 0
    pause_s: float = 11.0
    switches: int | None = None
    setting: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass(frozen=True, slots=True)
class Violation:
    """A shortest way to a world in which an invariant is broken."""

    invariant: str
    what: str
    trace: tuple[Step, ...]

    def __str__(self) -> str:
        return "\n".join([f"{self.invariant}: {self.what}", *(f"  {step}" for step in self.trace)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Exploration:
    """What was explored: `interleavings` orders of steps, which pass through `states` by `steps`."""

    interleavings: int
    states: int
    steps: int
    violations: tuple[Violation, ...]


class _State(NamedTuple):
    objects: int  # the number of their contents
    actors: tuple[History, ...]
    dead: frozenset[str] = frozenset()
    now_s: float = START_S
    deaths: int = 0
    pauses: int = 0
    switches: int = 0
    last: str = ""


def explore(scenario: Scenario, *, until_violation: bool = False) -> Exploration:
    """Explore all orders within the scenario's bounds; with `until_violation`, only until an invariant is broken."""
    return _Explorer(scenario).explore(until_violation)


class _Explorer:
    """The states of one scenario, the ones with fewer steps first."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._actors = Actors(scenario.actors)
        self._numbers: dict[frozenset[tuple[str, bytes]], int] = {}
        self._contents: list[dict[str, bytes]] = []
        self._came_by: dict[_State, tuple[_State, Step] | None] = {}
        self._violations: dict[str, Violation] = {}

    def explore(self, until_violation: bool) -> Exploration:
        """All that can be reached. As many ways lead to a state as to the states before it together."""
        ways: dict[_State, int] = {}
        interleavings = steps = 0
        with self._actors.isolated(), self._scenario.setting():
            objects = dict(self._scenario.objects)
            first = _State(
                objects=self._number(objects),
                actors=tuple(self._actors.begin(name, objects, START_S) for name in self._scenario.actors),
            )
            ways[first], self._came_by[first] = 1, None
            states = deque([first])
            while states and not (until_violation and self._violations):
                state = states.popleft()
                if len(ways) > MAX_STATES:
                    raise AssertionError(f"{self._scenario.name}: more than {MAX_STATES} states")
                following = self._following(state)
                interleavings += 0 if following else ways[state]
                for step, after in following:
                    steps += 1
                    if self._breaks(state, step, after):
                        interleavings += ways[state]
                        continue
                    if after not in ways:
                        ways[after], self._came_by[after] = 0, (state, step)
                        states.append(after)
                    ways[after] += ways[state]
        return Exploration(
            interleavings=interleavings, states=len(ways), steps=steps, violations=tuple(self._violations.values())
        )

    def _following(self, state: _State) -> list[tuple[Step, _State]]:
        """All that can come next. A death matters only before a change, a pause only before a look at the clock."""
        scenario = self._scenario
        waiting = [
            (place, history, history.next)
            for place, history in enumerate(state.actors)
            if isinstance(history.next, Request) and history.name not in state.dead
        ]
        found = []
        goes_on = any(history.name == state.last for _, history, _ in waiting)
        for place, history, request in waiting:
            switches = state.switches + (goes_on and history.name != state.last)
            if scenario.switches is None:
                found.append(self._answered(state, place, request))
            elif switches <= scenario.switches:
                step, after = self._answered(state, place, request)
                found.append((step, after._replace(switches=switches, last=history.name)))
            if state.deaths < scenario.deaths and request.kind in DAMAGE:
                dead = state._replace(dead=state.dead | {history.name}, deaths=state.deaths + 1)
                found.append((Step(history.name, f"dies before {request}"), dead))
        if state.pauses < scenario.pauses and any(request.kind == "clock" for _, _, request in waiting):
            later = state._replace(now_s=state.now_s + scenario.pause_s, pauses=state.pauses + 1)
            found.append((Step("", f"{scenario.pause_s:g} s pass"), later))
        return found

    def _answered(self, state: _State, place: int, request: Request) -> tuple[Step, _State]:
        """The step in which the request of the actor at `place` is answered."""
        name, before = state.actors[place].name, self._contents[state.objects]
        objects, answer = done(before, request)
        now_s, actors, dead = now_after(request, objects, state.now_s), list(state.actors), state.dead
        match request.kind:
            case "clock":
                answer = now_s
            case "start":
                actors.append(self._actors.begin(request.key, objects, now_s))
            case "kill":
                dead |= {request.key}
        actors[place] = self._actors.answer(actors[place], answer, objects, now_s)
        number = state.objects if objects is before else self._number(objects)
        after = _State(number, tuple(actors), dead, now_s, *state[4:])
        error = answer.__name__ if isinstance(answer, type) else ""
        step = Step(name, request.kind, request.key, error, before.get(request.key), objects.get(request.key))
        return step, self._with_clocks_read(after)

    def _with_clocks_read(self, state: _State) -> _State:
        """As long as time can still pass, a look at the clock is a step; then it is none."""
        clocks = any(isinstance(actor.next, Request) and actor.next.kind == "clock" for actor in state.actors)
        if state.pauses < self._scenario.pauses or not clocks:
            return state
        actors = list(state.actors)
        for place in range(len(actors)):
            while isinstance(request := actors[place].next, Request) and request.kind == "clock":
                actors[place] = self._actors.answer(
                    actors[place], state.now_s, self._contents[state.objects], state.now_s
                )
        return state._replace(actors=tuple(actors))

    def _number(self, objects: dict[str, bytes]) -> int:
        number = self._numbers.setdefault(frozenset(objects.items()), len(self._contents))
        if number == len(self._contents):
            self._contents.append(objects)
        return number

    def _breaks(self, state: _State, step: Step, after: _State) -> bool:
        """Whether an invariant is broken after `step`; then its violation is noted, and nothing more explored there."""
        world = World(self._contents[state.objects], self._contents[after.objects], after.actors, after.dead, step)
        broken = False
        for invariant in (Invariant(ENDS, self._failure), *self._scenario.invariants):
            try:
                what = invariant.broken(world)
            except FuncPipeError as error:
                what = error_text(error)
            if what is not None:
                broken = True
                self._violations.setdefault(invariant.name, Violation(invariant.name, what, self._trace(state, step)))
        return broken

    def _failure(self, world: World) -> str | None:
        for name, result in world.results.items():
            if isinstance(result, Exception) and not isinstance(result, self._scenario.errors):
                return f"{name}: {type(result).__name__}: {result}"
        return None

    def _trace(self, state: _State, step: Step) -> tuple[Step, ...]:
        steps, came_by = [step], self._came_by[state]
        while came_by is not None:
            steps.append(came_by[1])
            came_by = self._came_by[came_by[0]]
        return tuple(reversed(steps))
