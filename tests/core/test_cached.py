"""Properties that are computed once: by one instance while another one waits, and the same for all threads."""

import threading
from concurrent.futures import ThreadPoolExecutor

from funcpipe.core.cached import cached_property
from tests.support.waiting import LONG_S


class Reader:
    """Reads `value` once others have let it, as a client whose storage does not answer."""

    def __init__(self, answer: str) -> None:
        self.begun, self.answered = threading.Event(), threading.Event()
        self.answer = answer
        self.asked = 0

    @cached_property
    def value(self) -> list[str]:
        self.asked += 1
        self.begun.set()
        assert self.answered.wait(LONG_S)
        return [self.answer]


def test_an_instance_computes_while_another_one_waits() -> None:
    first, second = Reader("first"), Reader("second")
    second.answered.set()
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(lambda: first.value)
        assert first.begun.wait(LONG_S)
        assert threads.submit(lambda: second.value).result(LONG_S) == ["second"]
        first.answered.set()
        assert waiting.result(LONG_S) == ["first"]


def test_it_is_computed_once() -> None:
    reader = Reader("x")
    reader.answered.set()
    assert reader.value is reader.value
    assert reader.asked == 1


def test_threads_that_read_it_at_once_get_the_same_value() -> None:
    reader = Reader("x")
    with ThreadPoolExecutor(2) as threads:
        found = [threads.submit(lambda: reader.value) for _ in range(2)]
        while reader.asked < 2:
            assert reader.begun.wait(LONG_S)
        reader.answered.set()
        first, second = (one.result(LONG_S) for one in found)
    assert first is second
