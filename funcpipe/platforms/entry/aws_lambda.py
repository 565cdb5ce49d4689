"""The function's entry on AWS Lambda, which AWS's runtime client, awslambdaric, calls for every invocation."""

import json
import os
from typing import Any, Protocol

from funcpipe.platforms.catalog import open_storage
from funcpipe.platforms.entry import function as entry
from funcpipe.platforms.shared.key_wrap import unwrap_payload

CONTROL = "FUNCPIPE_CONTROL"
"""The environment variable with the URL of the storage where clients ask functions to stop."""


class Context(Protocol):
    """What the runtime client tells of an invocation."""

    aws_request_id: str


def handler(event: dict[str, Any], context: Context) -> dict[str, str]:
    """Run the worker whose payload is `event`; raises WorkerFailed, which Lambda records, when it failed.

    An empty event only wakes the function.
    """
    if not event:
        return {"invocation": context.aws_request_id}
    with entry.StopWatch(open_storage(os.environ[CONTROL], retry_s=0), context.aws_request_id):
        entry.run(unwrap_payload(json.dumps(event)))
    return {"invocation": context.aws_request_id}
