"""The function's entry on AWS Lambda, which AWS's runtime client, awslambdaric, calls for every invocation."""

import json
import os
from typing import Any, Protocol

from funcpipe.platforms import entry
from funcpipe.platforms.base import Invoked
from funcpipe.platforms.catalog import open_storage
from funcpipe.platforms.shared.cloud import unwrap_payload

CONTROL = "FUNCPIPE_CONTROL"
"""The environment variable with the URL of the storage where clients ask functions to stop."""

PRELOADS = "FUNCPIPE_PRELOADS"
"""The environment variable of functions that import torch in Lambda's init phase."""

_LEAST_S = 1e-3
_INIT_S = 8.0  # Lambda begins anew, and bills both, where the init phase takes more than 10 s
_ENVIRONMENT = entry.Environment(entry.process_age_s())  # Lambda bills it since August 2025
if os.environ.get(PRELOADS):
    _ENVIRONMENT.load_within(max(_INIT_S - entry.process_age_s(), 0.0))


class Context(Protocol):
    """The runtime client's information about an invocation."""

    aws_request_id: str

    def get_remaining_time_in_millis(self) -> int:
        """Return the milliseconds until Lambda ends the invocation."""


def handler(event: dict[str, Any], context: Context) -> dict[str, str]:
    """Run the worker whose payload is `event`; raises WorkerFailed, which Lambda records, when it failed.

    An empty event only wakes the function.
    """
    lifetime_s = max(context.get_remaining_time_in_millis() / 1000, _LEAST_S)
    invoked = _ENVIRONMENT.invoked(lifetime_s=lifetime_s)
    if not event:
        return {"invocation": context.aws_request_id}
    try:
        _run(json.dumps(event), context.aws_request_id, invoked)
    finally:
        entry.free_memory()
    return {"invocation": context.aws_request_id}


def _run(payload: str, request: str, invoked: Invoked) -> None:
    control = open_storage(os.environ[CONTROL], retry_s=0, meter=invoked.meter)
    with entry.StopWatch(control, request):
        entry.run(unwrap_payload(payload), invoked)
