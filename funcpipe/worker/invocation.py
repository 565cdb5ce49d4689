"""What every function runs: its payload says whether it is a worker of a training run, or a probe that measures."""

import json
from collections.abc import Callable

from funcpipe.core import ProbeSpec, WorkerSpec
from funcpipe.errors import FormatError
from funcpipe.platforms.base import Platform, Storage
from funcpipe.worker.deferred_compiler import defer_compiler


def main(payload: str, *, open_storage: Callable[[str], Storage], open_platform: Callable[[str], Platform]) -> None:
    """Run the invocation described by `payload`, JSON text.

    `open_storage` and `open_platform` open the storage and the platform that the payload names by URL.
    """
    try:
        payload_format = json.loads(payload)["format"]
    except (ValueError, TypeError, KeyError):
        raise FormatError("the invocation payload: field 'format' is missing") from None
    if payload_format == ProbeSpec.FORMAT:
        from funcpipe.profiler.remote.function import main as probe

        defer_compiler()
        probe(payload, open_storage=open_storage)
    elif payload_format == WorkerSpec.FORMAT:
        from funcpipe.worker.attempt import main as work

        defer_compiler()
        work(payload, open_storage=open_storage, open_platform=open_platform)
    else:
        expected = f"{WorkerSpec.FORMAT!r} or {ProbeSpec.FORMAT!r}"
        raise FormatError(f"the invocation payload: field 'format' is {payload_format!r}, expected {expected}")
