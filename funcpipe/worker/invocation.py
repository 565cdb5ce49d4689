"""The entry of every function: a worker of a run, one of a parameter server, a probe that measures, or a watchdog."""

import functools
import importlib
import json

from funcpipe.core import ProbeSpec, ServerFunctionSpec, WatchSpec, WorkerSpec, from_text
from funcpipe.core.start import StartPart
from funcpipe.errors import FormatError
from funcpipe.platforms.base import Invoked, OpenPlatform, OpenStorage

WITH_TORCH = {
    WorkerSpec.FORMAT: "funcpipe.worker.attempt",
    ServerFunctionSpec.FORMAT: "funcpipe.neighbours.parameter_server.function_worker",
    ProbeSpec.FORMAT: "funcpipe.profiler.remote.function",
}
"""The modules whose `main` runs payloads of these formats; each is loaded only by the functions that need it."""

_ENTRIES = WITH_TORCH | {WatchSpec.FORMAT: "funcpipe.worker.watchdog"}


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
    if not isinstance(payload_format, str) or payload_format not in _ENTRIES:
        expected = " or ".join(repr(known) for known in _ENTRIES)
        raise FormatError(f"the invocation payload: field 'format' is {payload_format!r}, expected {expected}")
    invoked = invoked or Invoked()
    run = functools.partial(_run, payload, open_storage, open_platform, invoked)
    if payload_format not in WITH_TORCH:
        run(_ENTRIES[payload_format])
        return
    with invoked.start.part(StartPart.TORCH):
        importlib.import_module("torch")
    with invoked.start.part(StartPart.MODULES):
        from funcpipe.worker.environment import left_as_found

        _defer_compiler()
    with left_as_found():
        run(WITH_TORCH[payload_format])


def _run(payload: str, open_storage: OpenStorage, open_platform: OpenPlatform, invoked: Invoked, module: str) -> None:
    with invoked.start.part(StartPart.MODULES):
        entry = importlib.import_module(module)
    entry.main(payload, open_storage=open_storage, open_platform=open_platform, invoked=invoked)


def load(payload: str, *, open_storage: OpenStorage) -> object:
    """Return the stage of the worker that `payload` describes, for functions that are forked from this process."""
    attempt = importlib.import_module(WITH_TORCH[WorkerSpec.FORMAT])
    _defer_compiler()
    return attempt.load(from_text(WorkerSpec, payload, source="the invocation payload"), open_storage)


def _defer_compiler() -> None:
    from funcpipe.worker.deferred_compiler import defer_compiler

    defer_compiler()
