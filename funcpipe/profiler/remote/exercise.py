"""Train tiny networks, to see how much memory torch itself needs in a function."""

import resource
import sys
from pathlib import Path

import torch
from torch import nn

_STATUS = Path("/proc/self/status")


def exercise() -> None:
    """Train small networks of common layers, which loads the pages of torch's libraries that training needs."""
    sight = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 8)
    )
    words = nn.Sequential(
        nn.Embedding(9, 16), nn.TransformerEncoderLayer(16, 2, 32, activation="gelu", batch_first=True)
    )
    loss = nn.functional.cross_entropy(sight(torch.rand(4, 3, 8, 8)), torch.arange(4))
    (loss + words(torch.ones(2, 8).long()).sum()).backward()
    optimizers = (torch.optim.SGD(sight.parameters(), lr=0.1), torch.optim.AdamW(words.parameters(), lr=0.1))
    for optimizer in optimizers:
        optimizer.step()


def peak_bytes() -> int:
    """The peak resident memory of this process; on Linux, without that of the process it was forked from."""
    if _STATUS.exists():
        lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
