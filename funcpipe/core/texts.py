"""Texts that others have written, such as messages of exceptions: as much of them as is kept, and safe to show."""

import re

KEPT = 4096
"""The number of characters of a text that are kept of its beginning, and of its end."""

_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_REPLACEMENT = "\ufffd"


def shortened(text: str, *, kept: int = KEPT) -> str:
    """Return `text`, or its first and last `kept` characters where it is longer."""
    left_out = len(text) - 2 * kept
    if left_out <= 0:
        return text
    return f"{text[:kept]}\n… {left_out:,} characters are left out here …\n{text[-kept:]}"


def error_text(error: BaseException) -> str:
    """Return the kind and the message of an exception, as much of them as documents, logs and other messages take."""
    return shortened(f"{type(error).__name__}: {error}")


def error_line(error: BaseException) -> str:
    """Return the kind of an exception and the first line of its message."""
    first, *_ = str(error).strip().splitlines() or ["no message"]
    return shortened(f"{type(error).__name__}: {first}")


def printable(text: str) -> str:
    """Return `text` with a sign in place of what would command a terminal, turn its direction, or cannot be encoded."""
    return _UNSAFE.sub(_REPLACEMENT, text)


def encodable(text: str) -> str:
    """Return `text` with a sign in place of halves of characters, which JSON can hold and no file or terminal."""
    return _SURROGATE.sub(_REPLACEMENT, text)
