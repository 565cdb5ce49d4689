"""Where threads of this process are, sampled from within: a profile of what several threads do side by side."""

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_WAITING = {"wait", "sleep", "acquire", "join", "select", "poll", "next", "wait_for", "sleep_until", "enter"}


@contextmanager
def sampled(every_s: float = 0.005) -> Iterator[Counter[str]]:
    """Count, by function and line, where all other threads are, of those that do not wait for each other."""
    found: Counter[str] = Counter()
    ended = threading.Event()

    def sample() -> None:
        own = threading.get_ident()
        while not ended.is_set():
            for thread, frame in sys._current_frames().items():
                if thread != own and frame.f_code.co_name not in _WAITING:
                    found[_place(frame)] += 1
            time.sleep(every_s)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def show(found: Counter[str], lines: int = 12) -> str:
    """The places with the most samples, with their share of all."""
    total = sum(found.values()) or 1
    return "\n".join(f"{count / total:6.1%}  {place}" for place, count in found.most_common(lines))


def _place(frame: FrameType) -> str:
    code = frame.f_code
    return f"{Path(code.co_filename).parent.name}/{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}"
