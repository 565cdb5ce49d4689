"""What a function needs before it holds any of a model."""

import functools
import subprocess
import sys

from funcpipe.errors import RunError

_START = """
import os, resource, sys, torch, funcpipe.allocator, funcpipe.worker
"""
_FORK = """
import torch._dynamo
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""
_WORK = """
from torch import nn
funcpipe.allocator.settle()
torch.set_num_threads(1)
sight = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 8))
words = nn.Sequential(nn.Embedding(9, 16), nn.TransformerEncoderLayer(16, 2, 32, activation="gelu", batch_first=True))
loss = nn.functional.cross_entropy(sight(torch.rand(4, 3, 8, 8)), torch.arange(4))
(loss + words(torch.ones(2, 8).long()).sum()).backward()
for parameters, optimizer in ((sight, torch.optim.SGD), (words, torch.optim.AdamW)):
    optimizer(parameters.parameters(), lr=0.1).step()
if os.path.exists("/proc/self/status"):  # what getrusage says includes the process that started this one
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    print(int(lines["VmHWM"].split()[0]) * 1024)
else:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(peak if sys.platform == "darwin" else peak * 1024)
"""


@functools.cache
def base_memory_bytes(*, forked: bool, modules: frozenset[str] = frozenset()) -> int:
    """The peak resident bytes of a function that imports `modules` and trains small networks of common kinds of layer:
    the pages of torch's libraries that this touches count as well.

    Functions are fresh processes, or `forked` from one that has loaded torch already, as on the local platform; then
    less of what all of them share is counted.
    """
    imports = "".join(f"import {name}\n" for name in sorted(modules))
    code = _START + (_FORK if forked else "") + imports + _WORK
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        raise RunError(f"the memory of an empty function could not be measured: {done.stderr.strip()[-500:]}")
    return int(done.stdout)
