"""The errors of clouds that funcpipe knows: what they mean to it, and what to do about them."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from funcpipe.errors import FuncPipeError, PlatformBusy, PlatformError, PlatformRefused
from funcpipe.platforms.base import Cause

_TOO_MANY_REQUESTS = 429


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownError:
    """Errors whose code matches the expression `code`, as `source` documents it; `remedy` says what to do.

    Without a remedy they pass: who waits and tries again may succeed. Of a `general` one, the error's words may suggest
    something better.
    """

    code: str
    source: str
    remedy: str = ""
    general: bool = False


EXPIRED = KnownError(
    code=r"^(ExpiredToken(Exception)?|SecurityTokenExpired|InvalidSecurityToken\.Expired)$",
    remedy="the temporary credentials have expired: log in again, or set new ones, and resume what was running",
    source="docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html and IAM's CommonErrors.html, 2026-11; "
    "alibabacloud.com/help/en/oss/support/0002-00000007 and the common errors of its gateways, 2026-11",
)
SKEWED = KnownError(
    code=r"^(RequestTimeTooSkewed|RequestExpired|RequestInTheFuture|InvalidTimeStamp\.Expired)$",
    remedy="the clock of this machine is minutes off: set it, as by `timedatectl set-ntp true`",
    source="docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html and IAM's CommonErrors.html, 2026-11; "
    "alibabacloud.com/help/en/oss/support/0002-00000504 and the common errors of its gateways, 2026-11",
)
_SKEWED_SIGNATURE = re.compile(r"^Signature (expired|not yet current): ")
"""The begin of AWS's message about a signature that does not match because it was made at another time."""


def remedy_for_credentials(code: str, message: str) -> str | None:
    """Return the remedy for credentials that have expired, or for a clock that is wrong; None for other answers."""
    if _SKEWED_SIGNATURE.match(message):
        return SKEWED.remedy
    return next((one.remedy for one in (EXPIRED, SKEWED) if re.search(one.code, code)), None)


@dataclass(frozen=True, slots=True)
class KnownEnding:
    """The ending of a function if the expression `text` is in the type or message of its error; `source` has it."""

    text: str
    cause: Cause
    source: str


def error_of(known: Iterable[KnownError], text: str, *, code: str, status: int, remedy: str | None) -> FuncPipeError:
    """Return funcpipe's error for an answer with this code and HTTP status; its words suggest `remedy`, if known."""
    found = next((one for one in known if re.search(one.code, code)), None)
    if found is not None and found.remedy:
        return PlatformRefused(f"{text}; {(found.general and remedy) or found.remedy}")
    if found is not None or status >= 500 or status == _TOO_MANY_REQUESTS:
        return PlatformBusy(text)
    return PlatformError(text) if remedy is None else PlatformRefused(f"{text}; {remedy}")
