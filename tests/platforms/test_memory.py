import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from funcpipe.platforms import memory
from funcpipe.platforms.memory import peak_memory_bytes

_USES_200_MB = """
from funcpipe.platforms.memory import peak_memory_bytes
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
