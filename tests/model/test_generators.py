"""The generators of a process: in one hand at a time, and computing goes before loading."""

import threading
from typing import Any

import pytest

from funcpipe.model.draws import Generators
from tests.support.waiting import LONG_S


def test_who_computes_goes_before_who_loads() -> None:
    generators, order = Generators(), list[str]()
    has_it, may_end = threading.Event(), threading.Event()

    def load(name: str) -> None:
        with generators.loading():
            order.append(name)
            has_it.set()
            may_end.wait(LONG_S)

    def compute() -> None:
        with generators.computing(), generators.computing(), generators.loading():
            order.append("compute")

    first = threading.Thread(target=load, args=("load 1",))
    first.start()
    assert has_it.wait(LONG_S)
    others = [threading.Thread(target=load, args=("load 2",)), threading.Thread(target=compute)]
    others[1].start()
    while not generators._computing:
        pass  # until it waits
    others[0].start()
    may_end.set()
    for thread in (first, *others):
        thread.join(10)
    assert order == ["load 1", "compute", "load 2"]


class Interrupted(threading.Condition):
    """A thread is interrupted while it waits."""

    def wait_for(self, predicate: object, timeout: float | None = None) -> Any:
        raise KeyboardInterrupt


def test_who_is_interrupted_in_waiting_is_not_waited_for() -> None:
    generators, has_them, may_end = Generators(), threading.Event(), threading.Event()

    def compute() -> None:
        with generators.computing():
            has_them.set()
            may_end.wait(10)

    thread = threading.Thread(target=compute)
    thread.start()
    assert has_them.wait(10)
    free, generators._free = generators._free, Interrupted()
    for take in (generators.computing, generators.loading):
        with pytest.raises(KeyboardInterrupt), take():
            raise AssertionError("another thread has them")
    generators._free = free
    may_end.set()
    thread.join(10)
    with generators.loading():
        assert generators.are_held
    assert not generators.are_held


def test_a_forked_process_finds_them_free() -> None:
    generators = Generators()
    with generators.loading():
        forked = Generators()
        forked.__dict__.update(vars(generators))
        forked.forget()
        taken: list[bool] = []

        def take() -> None:
            with forked.computing():
                taken.append(True)

        thread = threading.Thread(target=take)
        thread.start()
        thread.join(10)
    assert taken == [True]
