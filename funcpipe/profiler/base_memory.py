"""What a function needs before it holds any of a model."""

import functools
import subprocess
import sys

from funcpipe.errors import RunError

_PROBE = """
import resource, sys, torch, funcpipe.split
net = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(8, 2))
net(torch.ones(1, 1, 4, 4)).sum().backward()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(peak if sys.platform == "darwin" else peak * 1024)
"""


@functools.cache
def base_memory_bytes() -> int:
    """The peak resident bytes of a fresh process that has trained a tiny network with funcpipe loaded."""
    done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        raise RunError(f"the memory of an empty function could not be measured: {done.stderr.strip()[-500:]}")
    return int(done.stdout)
