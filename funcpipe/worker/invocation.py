"""What every function runs: its payload says whether it is a worker of a training run or measures something."""

import json
from collections.abc import Callable

from funcpipe.core import ProbeSpec, WorkerSpec
from funcpipe.errors import FormatError
from funcpipe.platforms.base import Platform, Storage
from funcpipe.worker.eager import defer_compiler


def main(payload: str, *, open_storage: Callable[[str], Storage], open_platform: Callable[[str], Platform]) -> None:
    """Do what the JSON text `payload` says; it is checked where it is read.

    Storage and platform, which the payload names by their URLs, are opened by the callables.
    """
    try:
        told = json.loads(payload)["format"]
    except (ValueError, TypeError, KeyError):
        raise FormatError("the invocation payload: field 'format' is missing") from None
    if told == ProbeSpec.FORMAT:
        from funcpipe.profiler.remote.function import main as probe

        defer_compiler()
        probe(payload, open_storage=open_storage)
    elif told == WorkerSpec.FORMAT:
        from funcpipe.worker.loop import main as work

        defer_compiler()
        work(payload, open_storage=open_storage, open_platform=open_platform)
    else:
        expected = f"{WorkerSpec.FORMAT!r} or {ProbeSpec.FORMAT!r}"
        raise FormatError(f"the invocation payload: field 'format' is {told!r}, expected {expected}")
