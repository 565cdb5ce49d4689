"""Functions allocate with tcmalloc, unless their user wants another allocator, and then need what they use."""

import os
import subprocess
import sys

import pytest

from funcpipe.platforms import process as allocator
from funcpipe.platforms.process import environment

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
