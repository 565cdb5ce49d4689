"""A function that is told to stop, and one whose work fails."""

import threading

import pytest

from funcpipe.errors import FormatError
from funcpipe.platforms.entry.function import STOPPED, StopWatch, run, stop_key
from funcpipe.testing.memory_storage import MemoryStorage


def test_a_watch_ends_the_process_once_it_is_told_to() -> None:
    storage, codes, ended = MemoryStorage(), list[int](), threading.Event()

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    with StopWatch(storage, "request", poll_s=0.01, end=end):
        assert not ended.wait(0.1)
        storage.put(stop_key("another"), b"")
        assert not ended.wait(0.1)
        storage.put(stop_key("request"), b"")
        assert ended.wait(10)
    assert codes == [STOPPED]


def test_a_watch_ends_with_its_invocation() -> None:
    storage, codes = MemoryStorage(), list[int]()
    with StopWatch(storage, "request", poll_s=0.01, end=codes.append):
        pass
    storage.put(stop_key("request"), b"")
    assert codes == []
    assert not [thread for thread in threading.enumerate() if thread.name == "funcpipe-stop"]


def test_a_payload_that_is_none_is_told() -> None:
    with pytest.raises(FormatError, match="the invocation payload"):
        run("{}")
