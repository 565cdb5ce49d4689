"""The entry of every function: a worker of a run, one of a parameter server, a probe that measures, or a watchdog."""

import json

from funcpipe.core import ProbeSpec, ServerFunctionSpec, WatchSpec, WorkerSpec
from funcpipe.errors import FormatError
from funcpipe.platforms.base import Invoked, OpenPlatform, OpenStorage
from funcpipe.worker.deferred_compiler import defer_compiler


def main(
    payload: str, *, open_storage: OpenStorage, open_platform: OpenPlatform, invoked: Invoked | None = None
) -> None:
    """Run the invocation described by `payload`, JSON text.

    `open_storage` and `open_platform` open the storage and the platform that the payload names by URL. The function was
    `invoked` just now, unless that says otherwise.
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
        work(payload, open_storage=open_storage, open_platform=open_platform, invoked=invoked or Invoked())
    elif payload_format == ServerFunctionSpec.FORMAT:
        from funcpipe.parameter_server.function_worker import main as serve

        defer_compiler()
        serve(payload, open_storage=open_storage, invoked=invoked or Invoked())
    elif payload_format == WatchSpec.FORMAT:
        from funcpipe.worker.watchdog import main as watch  # which does without torch

        watch(payload, open_storage=open_storage, open_platform=open_platform)
    else:
        known = (WorkerSpec, ServerFunctionSpec, ProbeSpec, WatchSpec)
        expected = " or ".join(repr(kind.FORMAT) for kind in known)
        raise FormatError(f"the invocation payload: field 'format' is {payload_format!r}, expected {expected}")
