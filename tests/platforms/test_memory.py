import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from funcpipe.platforms import process as memory
from funcpipe.platforms.process import PeakMemory, peak_memory_bytes

_USES_200_MB = """
from funcpipe.platforms.process import peak_memory_bytes
before = peak_memory_bytes()
used = bytearray(b"1") * 200_000_000
print(before, peak_memory_bytes())
"""


@pytest.mark.parametrize(("system", "told", "peak"), [("darwin", 5_000_000, 5_000_000), ("freebsd14", 5000, 5_120_000)])
def test_the_peak_is_in_bytes_whatever_unit_the_system_tells_it_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, system: str, told: int, peak: int
) -> None:
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "none")
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=told))
    assert peak_memory_bytes() == peak


def test_the_peak_grows_with_what_is_used() -> None:
    # In a process of its own: here an earlier test may have used more, and freed it.
    told = subprocess.run([sys.executable, "-c", _USES_200_MB], capture_output=True, text=True, check=True).stdout
    before, after = map(int, told.split())
    assert 190e6 < after - before < 250e6


_WARM = """
from funcpipe.platforms.process import PeakMemory
first = PeakMemory()
used = bytearray(b"1") * 200_000_000
del used
second = PeakMemory()
early = second.peak_bytes()
used = bytearray(b"1") * 50_000_000
print(first.peak_bytes(), early, second.peak_bytes())
"""

_UNPERMITTED = """
from pathlib import Path
from funcpipe.platforms import process as memory
memory._CLEAR = Path("/proc/self/no_such_file")
"""


@pytest.mark.skipif(not memory._CLEAR.exists(), reason="needs Linux")
def test_the_peak_of_a_warm_environment_is_that_of_the_run_that_asks() -> None:
    told = subprocess.run([sys.executable, "-c", _WARM], capture_output=True, text=True, check=True).stdout
    _, early, late = map(int, told.split())
    assert early < 100e6
    assert 45e6 < late - early < 75e6


@pytest.mark.skipif(not memory._STATUS.exists(), reason="needs Linux")
def test_the_peak_is_what_was_seen_where_nobody_may_reset_it() -> None:
    code = _UNPERMITTED + _WARM
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    first, early, late = map(int, told.split())
    assert first > 200e6  # its figure has grown since it began
    assert early < 100e6
    assert 45e6 < late - early < 75e6


def test_the_peak_is_that_of_the_process_where_the_system_tells_no_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "none")
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "none" / "none")
    assert PeakMemory().peak_bytes() == peak_memory_bytes() > 0
