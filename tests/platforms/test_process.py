"""Functions allocate with tcmalloc, unless their user wants another allocator, and then need what they use."""

import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from funcpipe.platforms import process as allocator
from funcpipe.platforms import process as memory
from funcpipe.platforms.process import PeakMemory, environment, peak_memory_bytes, usable_processors

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


WORK = """
import torch
from torch import nn
from funcpipe.platforms.process import configure
from funcpipe.platforms.process import peak_memory_bytes
from funcpipe.profiler.remote.exercise import exercise
from funcpipe.profiler.measure import live_bytes

configure()
torch.set_num_threads(1)
layers = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(12)]
network = nn.Sequential(*layers)

def train():
    for output in [network(torch.ones(8, 16, 32, 32)).sum() for _ in range(4)]:
        output.backward()

exercise()
before = peak_memory_bytes()
for _ in range(3):
    train()
grown = peak_memory_bytes() - before
print(any("libtcmalloc_minimal" in line for line in open("/proc/self/maps")), grown / live_bytes(train)[1])
"""


@pytest.mark.skipif(environment().get("LD_PRELOAD") != allocator.LIBRARY, reason="tcmalloc is not installed")
def test_a_convolutional_network_needs_little_more_than_its_tensors() -> None:
    done = subprocess.run([sys.executable, "-c", WORK], env=environment(), capture_output=True, text=True, check=True)
    loaded, ratio = done.stdout.split()
    assert loaded == "True"
    assert 0.9 < float(ratio) < 1.2  # with glibc 2.36 it is 1.7
    assert "preload" not in done.stderr


def test_another_allocator_that_is_preloaded_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/somewhere/libjemalloc.so.2")
    assert environment()["LD_PRELOAD"] == "/somewhere/libjemalloc.so.2"


def test_without_tcmalloc_the_environment_is_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "_installed", lambda: None)
    assert environment() == dict(os.environ)


def test_a_process_that_is_bound_to_some_processors_uses_those(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 5}, raising=False)
    assert usable_processors() == 3


@pytest.mark.parametrize(("count", "usable"), [(8, 8), (None, 1)])
def test_elsewhere_it_uses_those_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, count: int | None, usable: int
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    assert usable_processors() == usable
