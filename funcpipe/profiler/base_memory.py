"""What a function needs before it holds any of a model."""

import functools
import subprocess
import sys

from funcpipe.errors import RunError

_START = """
import os, resource, sys, torch, funcpipe.worker
"""
_FORK = """
import torch._dynamo
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""
_WORK = """
torch.set_num_threads(1)
net = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(8, 2))
net(torch.ones(1, 1, 4, 4)).sum().backward()
torch.optim.SGD(net.parameters(), lr=0.1).step()
if os.path.exists("/proc/self/status"):  # what getrusage says includes the process that started this one
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    print(int(lines["VmHWM"].split()[0]) * 1024)
else:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(peak if sys.platform == "darwin" else peak * 1024)
"""


@functools.cache
def base_memory_bytes(*, forked: bool, modules: frozenset[str] = frozenset()) -> int:
    """The peak resident bytes of a function that imports `modules` and trains a network of no size.

    Functions are fresh processes, or `forked` from one that has loaded torch already, as on the local platform; then
    less of what all of them share is counted.
    """
    imports = "".join(f"import {name}\n" for name in sorted(modules))
    code = _START + (_FORK if forked else "") + imports + _WORK
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        raise RunError(f"the memory of an empty function could not be measured: {done.stderr.strip()[-500:]}")
    return int(done.stdout)
