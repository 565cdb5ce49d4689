"""What every function runs: its payload says whether it is a worker of a training run or measures something."""

import json

from funcpipe.core import ProbeSpec, WorkerSpec
from funcpipe.eager import defer_compiler
from funcpipe.errors import FormatError


def main(payload: str) -> None:
    """Do what the JSON text `payload` says; it is checked where it is read."""
    try:
        told = json.loads(payload)["format"]
    except (ValueError, TypeError, KeyError):
        raise FormatError("the invocation payload: field 'format' is missing") from None
    if told == ProbeSpec.FORMAT:
        from funcpipe.probe.function import main as probe

        defer_compiler()
        probe(payload)
    elif told == WorkerSpec.FORMAT:
        from funcpipe.worker import main as work

        defer_compiler()
        work(payload)
    else:
        expected = f"{WorkerSpec.FORMAT!r} or {ProbeSpec.FORMAT!r}"
        raise FormatError(f"the invocation payload: field 'format' is {told!r}, expected {expected}")
