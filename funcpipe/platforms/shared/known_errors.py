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


@dataclass(frozen=True, slots=True)
class KnownEnding:
    """What ended a function if the expression `text` is found in the type or message of its error; `source` has it."""

    text: str
    cause: Cause
    source: str


def error_of(known: Iterable[KnownError], text: str, *, code: str, status: int, remedy: str | None) -> FuncPipeError:
    """What an answer with this code and HTTP status is to funcpipe; its words suggest `remedy`, if they are known."""
    found = next((one for one in known if re.search(one.code, code)), None)
    if found is not None and found.remedy:
        return PlatformRefused(f"{text}; {(found.general and remedy) or found.remedy}")
    if found is not None or status >= 500 or status == _TOO_MANY_REQUESTS:
        return PlatformBusy(text)
    return PlatformError(text) if remedy is None else PlatformRefused(f"{text}; {remedy}")
