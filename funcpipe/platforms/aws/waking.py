"""Waking of functions that were idle for weeks: Lambda has dropped their image, and makes it anew on invocation.

Such a function is Inactive. The invocation that wakes it is rejected; it is Pending until its image is there again,
then Active; if that fails, it is Inactive again, or Failed (docs.aws.amazon.com/lambda/latest/dg/images-create.html and
functions-states.html, 2026-11). It takes a minute or two (github.com/aws-solutions-library-samples/
accelerated-intelligent-document-processing-on-aws/issues/801: 40 to 106 s).
"""

from collections.abc import Iterable
from typing import Any

from funcpipe.errors import DeadlineExceeded, PlatformRefused
from funcpipe.platforms.shared.polling import Polling

WAKE_WITHIN_S = 300.0
"""A function that is not Active by then is given up."""

WAKING = "{}"
"""The payload that only wakes. A function that is awake already does nothing with it."""

_NOT_ACTIVE = {"CodeArtifactUserPendingException", "ResourceConflictException"}
_SLEEPING = {"Idle", "Restoring", "Creating", ""}


def wake(functions: Any, names: Iterable[str], polling: Polling, *, remedy: str) -> None:
    """Return when all functions called `names` are Active, after waking those that sleep, all at once.

    `functions` is Lambda's client. Raises PlatformRefused, which ends with the `remedy`, for a function that Lambda
    cannot make ready, and DeadlineExceeded for one that is not by WAKE_WITHIN_S.
    """
    until_s = polling.clock() + WAKE_WITHIN_S
    invoked: set[str] = set()
    waiting = list(names)
    while True:
        found = [functions.get_function_configuration(FunctionName=name) for name in waiting]
        asleep = [one for one in found if one.get("State", "Active") != "Active"]
        if not asleep:
            return
        waiting = [one["FunctionName"] for one in asleep]
        for one in asleep:
            _check(one, remedy, was_invoked=one["FunctionName"] in invoked)
            if one["State"] == "Inactive":
                _invoke(functions, one["FunctionName"], WAKING.encode())
                invoked.add(one["FunctionName"])
        if polling.clock() > until_s:
            raise DeadlineExceeded(f"{_late(waiting[0])}: it is {_described(asleep[0])}; try again, or {remedy}")
        polling.sleep(polling.every_s)


def invoke_awake(functions: Any, name: str, payload: bytes, polling: Polling) -> str:
    """Invoke a function with an event, again and again while it wakes up; returns the name of the request.

    Raises DeadlineExceeded for a function that has not become Active by WAKE_WITHIN_S.
    """
    until_s = polling.clock() + WAKE_WITHIN_S
    while (request := _invoke(functions, name, payload)) is None:
        if polling.clock() > until_s:
            raise DeadlineExceeded(f"{_late(name)}, as an invocation needs")
        polling.sleep(polling.every_s)
    return request


def _invoke(functions: Any, name: str, payload: bytes) -> str | None:
    """Return the name of the request; None where the function is not Active."""
    try:
        answer = functions.invoke(FunctionName=name, InvocationType="Event", Payload=payload)
    except functions.exceptions.ClientError as error:
        if error.response["Error"]["Code"] in _NOT_ACTIVE:
            return None
        raise
    return str(answer["ResponseMetadata"]["RequestId"])


def _check(found: dict[str, Any], remedy: str, *, was_invoked: bool) -> None:
    """Raise PlatformRefused for a function that Lambda could not make ready."""
    is_lost = found["State"] == "Inactive" and was_invoked and found.get("StateReasonCode", "") not in _SLEEPING
    if is_lost or found["State"] not in {"Inactive", "Pending"}:
        raise PlatformRefused(f"{found['FunctionName']} is {_described(found)}; {remedy}")


def _described(found: dict[str, Any]) -> str:
    code = f" ({found['StateReasonCode']})" if "StateReasonCode" in found else ""
    return f"{found['State']}: {found.get('StateReason', 'no reason given')}{code}"


def _late(name: str) -> str:
    return f"{name} has not become Active within {WAKE_WITHIN_S:g} s"
