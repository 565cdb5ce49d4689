"""The memory of a function before it holds any part of a model."""

import functools
import subprocess
import sys
import threading

from funcpipe.errors import RunError
from funcpipe.platforms.allocator import environment

_START = (
    "import os, sys, torch\n"
    "import funcpipe.platforms.allocator, funcpipe.worker.attempt, funcpipe.worker.deferred_compiler\n"
)
_FORK = """
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""
_WORK = """
from funcpipe.platforms.memory import peak_memory_bytes
from funcpipe.profiler.remote.exercise import exercise
funcpipe.worker.deferred_compiler.defer_compiler()
funcpipe.platforms.allocator.configure()
torch.set_num_threads(1)
exercise()
print(peak_memory_bytes())
"""


_MEASURING = threading.Lock()


def base_memory_bytes(*, forked: bool, modules: frozenset[str] = frozenset()) -> int:
    """Return the peak resident bytes of a function that imports `modules` and trains small networks of common layers,
    which touches the pages of torch's libraries that training needs.

    Functions are fresh processes, or `forked` from one that has loaded torch, as on the local platform; forked ones
    share pages, which are then not counted. Threads that ask at once wait for one measurement.
    """
    with _MEASURING:
        return _measured(forked, modules)


@functools.cache
def _measured(forked: bool, modules: frozenset[str]) -> int:
    imports = "".join(f"import {name}\n" for name in sorted(modules))
    code = _START + (_FORK if forked else "") + imports + _WORK
    command = [sys.executable, "-P", "-c", code]  # not with modules of the current folder, such as a platform.py
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        raise RunError(f"cannot measure the memory of an empty function: {done.stderr.strip()[-500:]}")
    return int(done.stdout)
