"""The explorer itself: it counts all orders, and finds mistakes however rare the order is that shows them."""

import time
from math import comb

import pytest

from funcpipe.errors import KeyExists, KeyMissing
from tests.support.actors import Actor, Program, Unrepeatable
from tests.support.explored_world import World
from tests.support.interleaving import ENDS, Invariant, Scenario, explore


def puts(count: int) -> Program:
    def program(actor: Actor) -> None:
        for number in range(count):
            actor.storage.put(f"{actor.name}-{number}", b"1")

    return program


def count_up(actor: Actor) -> int:
    try:
        value = int(actor.storage.get("count"))
    except KeyMissing:
        value = 0
    actor.storage.put("count", str(value + 1).encode())
    return value + 1


def lost_update(world: World) -> str | None:
    return "an update is lost" if world.is_over and world.objects.get("count") != b"2" else None


@pytest.mark.parametrize(("first", "second"), [(1, 1), (3, 2), (5, 6)])
def test_all_orders_of_two_actors_are_counted(first: int, second: int) -> None:
    found = explore(Scenario(name="puts", actors={"a": puts(first), "b": puts(second)}, invariants=()))
    assert found.interleavings == comb(first + second, first)
    assert found.states == (first + 1) * (second + 1)
    assert found.violations == ()


def test_a_bound_on_switches_leaves_orders_out() -> None:
    found = explore(Scenario(name="puts", actors={"a": puts(3), "b": puts(3)}, invariants=(), switches=0))
    assert found.interleavings == 2


def test_a_lost_update_is_found_by_a_shortest_way() -> None:
    actors = {"a": count_up, "b": count_up}
    (violation,) = explore(Scenario(name="", actors=actors, invariants=(Invariant("sum", lost_update),))).violations
    assert violation.what == "an update is lost"
    assert [step.what for step in violation.trace] == ["get", "get", "put", "put"]
    assert str(violation).splitlines()[1] == "  a: get count -> KeyMissing"


def test_a_death_is_explored_before_each_change() -> None:
    found = explore(Scenario(name="", actors={"a": puts(3)}, invariants=(), deaths=1))
    assert found.interleavings == 4
    invariant = Invariant("all or nothing", lambda world: "half" if world.dead and world.objects else None)
    assert explore(Scenario(name="", actors={"a": puts(2)}, invariants=(invariant,), deaths=1)).violations


def test_time_passes_only_before_a_look_at_the_clock() -> None:
    def looks(actor: Actor) -> float:
        began_s = actor.clock()
        actor.storage.put("x", b"")
        return actor.clock() - began_s

    def late(world: World) -> str | None:
        return "late" if world.results.get("a") == 11.0 else None

    scenario = Scenario(name="", actors={"a": looks}, invariants=(Invariant("in time", late),), pauses=1)
    assert [violation.what for violation in explore(scenario).violations] == ["late"]


def test_actors_start_and_kill_others() -> None:
    def parent(actor: Actor) -> None:
        actor.start("child", puts(2))
        actor.kill("child")

    seen = set()

    def note(world: World) -> None:
        if world.is_over:
            seen.add(len(world.objects))

    explore(Scenario(name="", actors={"a": parent}, invariants=(Invariant("", note),)))
    assert seen == {0, 1, 2}


def test_an_error_that_is_not_expected_is_told() -> None:
    def taken(actor: Actor) -> None:
        actor.storage.put("x", b"", if_absent=True)

    scenario = Scenario(name="", actors={"a": taken, "b": taken}, invariants=())
    assert [violation.invariant for violation in explore(scenario).violations] == [ENDS]
    allowed = Scenario(name="", actors={"a": taken, "b": taken}, invariants=(), errors=(KeyExists,))
    assert explore(allowed).violations == ()


def test_a_program_that_depends_on_anything_else_is_refused() -> None:
    runs = []

    def moody(actor: Actor) -> None:
        runs.append(1)
        actor.storage.put(f"run-{len(runs)}", b"")
        actor.storage.list("b")

    with pytest.raises(Unrepeatable, match="does not do the same again"):
        explore(Scenario(name="", actors={"a": moody, "b": puts(1)}, invariants=()))


def test_a_program_measures_time_from_where_it_began() -> None:
    def sleeps(actor: Actor) -> float:
        began_s = time.monotonic()
        time.sleep(3)
        actor.storage.list("b")
        time.sleep(4)
        return time.monotonic() - began_s

    wrong = Invariant("seven", lambda world: str(world.results) if world.results.get("a", 7.0) != 7.0 else None)
    found = explore(Scenario(name="", actors={"a": sleeps, "b": puts(2)}, invariants=(wrong,)))
    assert found.violations == ()
    assert found.interleavings == comb(5, 2)
