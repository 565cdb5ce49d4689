import os
import signal
import threading
from pathlib import Path

import pytest

from funcpipe.platforms.process import PeakMemory
from funcpipe.platforms.ray.task import OUT_OF_MEMORY, MemoryWatch, printed_in_order
from tests.ray_here import environment_of_ray
from tests.support.waiting import LONG_S


def test_what_is_printed_goes_where_lines_are_logged_and_then_does_not(capfd: pytest.CaptureFixture[str]) -> None:
    with printed_in_order():
        os.write(2, b"logged\n")
        os.write(1, b"printed\n")
    os.write(1, b"afterwards\n")
    assert capfd.readouterr() == ("afterwards\n", "logged\nprinted\n")


def test_what_ray_makes_of_signals_ends_with_a_ray_of_tests(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with environment_of_ray(tmp_path):
        signal.signal(signal.SIGTERM, lambda number, frame: None)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_function_beyond_its_memory_says_so_and_ends() -> None:
    told, ended = list[int](), threading.Event()
    codes = list[int]()

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    with MemoryWatch(PeakMemory(), 1, told.append, end=end):
        assert ended.wait(LONG_S)
    assert codes == [OUT_OF_MEMORY]
    assert [peak > 1 for peak in told] == [True]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_it_ends_where_nobody_can_be_told() -> None:
    ended = threading.Event()

    def tell(peak_bytes: int) -> None:
        raise ConnectionError

    with MemoryWatch(PeakMemory(), 1, tell, end=lambda code: ended.set()):
        assert ended.wait(LONG_S)


@pytest.mark.parametrize("memory_bytes", [None, 1 << 50])
def test_within_its_memory_nothing_happens(memory_bytes: int | None) -> None:
    before, called = threading.active_count(), list[int]()
    with MemoryWatch(PeakMemory(), memory_bytes, called.append, end=called.append):
        pass
    assert threading.active_count() == before
    assert called == []
