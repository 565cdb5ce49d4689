"""Errors in the form of each of AWS's protocols, and those of the emulation itself."""

import json
import traceback
from concurrent.futures import Future
from email.message import Message

Answer = tuple[int, bytes, dict[str, str]]
"""Status, body and headers."""


_THROTTLE = {"Reason": "ConcurrentInvocationLimitExceeded", "Type": "User", "message": "Rate Exceeded."}
_LAMBDA_SAYS: dict[str, tuple[int, dict[str, str]]] = {
    "TooManyRequestsException": (429, _THROTTLE),
    "ServiceException": (500, {"Type": "Service", "Message": "The Lambda service encountered an internal error."}),
}
"""Statuses and bodies as Lambda sends them (docs.aws.amazon.com/lambda/latest/api/API_Invoke.html, 2026-11)."""


def refusal(code: str, headers: "Message[str, str]", path: str) -> Answer:
    """An error of `code` that a test has asked for."""
    if code in _LAMBDA_SAYS:
        status, said = _LAMBDA_SAYS[code]
        return status, json.dumps(said).encode(), {"Content-Type": "application/json", "x-amzn-ErrorType": code}
    text = f"refused by the test: not authorized to perform this ({code})"
    if "x-www-form-urlencoded" in headers.get("Content-Type", ""):
        body = f"<ErrorResponse><Error><Code>{code}</Code><Message>{text}</Message></Error></ErrorResponse>"
        return 403, body.encode(), {"Content-Type": "text/xml"}
    if headers.get("X-Amz-Target") or path.startswith("/20"):
        return json_error(403, code, text)
    body = f"<Error><Code>{code}</Code><Message>{text}</Message></Error>"
    return 403, body.encode(), {"Content-Type": "application/xml"}


def json_error(status: int, code: str, text: str) -> Answer:
    """An error as Lambda and the services with targets word it."""
    body = json.dumps({"__type": code, "message": text})
    return status, body.encode(), {"Content-Type": "application/json", "x-amzn-ErrorType": code}


def print_error(done: "Future[None]") -> None:
    """Print what went wrong in the emulation; a test that waits for what was to be done shows it."""
    if not done.cancelled() and (error := done.exception()) is not None:
        traceback.print_exception(error)
