"""The function that a task of Ray runs."""

import importlib

from funcpipe.platforms.base import Invoked
from funcpipe.platforms.ray.library import ray
from funcpipe.platforms.ray.process import MemoryWatch, printed_in_order

_ENTRY = "funcpipe.platforms.entry.function"


def run_function(host: str, namespace: str, name: str, payload: str, memory_bytes: int | None) -> None:
    """Do what `payload` says; raises WorkerFailed when that failed. The host in `namespace` knows it by `name`.

    With more than `memory_bytes` the process ends, after a report to the host.
    """
    entry = importlib.import_module(_ENTRY)

    def report(peak_bytes: int) -> None:
        ray.get(ray.get_actor(host, namespace).used_too_much.remote(name, peak_bytes))

    invoked = Invoked()
    with printed_in_order(), MemoryWatch(invoked.memory, memory_bytes, report):
        entry.run(payload, invoked)
    entry.free_memory()
