"""Texts: those of others, as far as they are kept and safe to show; URLs without secrets; names; numbers in words."""

import math
import re
from urllib.parse import SplitResult, parse_qsl, urlsplit

from funcpipe.errors import InvalidValue

KEPT = 4096
"""The number of characters of a text that are kept of its beginning, and of its end."""

_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_REPLACEMENT = "\ufffd"
_WORKER = re.compile(r"s(\d+)\.r(\d+)", re.ASCII)


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


def without_surrogates(text: str) -> str:
    """Return `text` with a sign in place of halves of characters, which JSON can hold and no file or terminal."""
    return _SURROGATE.sub(_REPLACEMENT, text)


WorkerId = tuple[int, int]
"""The stage and the replica of a worker."""


def worker_name(stage: int, replica: int) -> str:
    """Return the short name of a worker, in keys, messages and logs: "s2.r0" is replica 0 of stage 2."""
    return f"s{stage}.r{replica}"


def stage_of(worker: str) -> int:
    """Return the stage of the worker of that name."""
    return int(worker[1:].partition(".")[0])


STAGE_PREFIXES = 16
"""The prefixes of storage over which the messages of one stage's replicas are spread, evenly."""


def spread_prefix(worker: str) -> str:
    """Return the prefix of three hexadecimal digits, one of a few that its stage has alone, of a worker's messages.

    Object stores split their keys by prefix, so the digit that differs between replicas comes first. Stages 256 apart
    share theirs.

    >>> spread_prefix("s2.r0"), spread_prefix("s2.r1"), spread_prefix("s2.r17")
    ('002', '102', '102')
    """
    match = _WORKER.fullmatch(worker)
    if match is None:
        raise InvalidValue("worker", worker, "must read like 's0.r1'")
    return f"{int(match[2]) % STAGE_PREFIXES:x}{int(match[1]) % 256:02x}"


_PUBLIC = ("endpoint", "region", "domain", "prefix", "via", "cpus", "market", "machine", "spot")
"""The options whose values are printed: those of others may be anything, such as a password."""

_USER = re.compile(r"(?<=://)(?:[^/?#\s:@]*:[^?#\s]*|[^/?#\s]*)@")
"""A user, perhaps with a password, which may have slashes in it that should have been escaped."""

_OPTION = re.compile(r"(?<=[?&])([^=&#,]+)=([^&#,]*)")
_HAS_USER = re.compile("@|%40")


def url_parts(field: str, url: str, *, credentials: str = "the environment") -> tuple[SplitResult, dict[str, str]]:
    """Return the parts of a URL, and its options by name.

    Raises InvalidValue, of the `field` that the URL is, for what is none, for one with an option that is given twice,
    and for one with credentials, which it does not show: they belong into `credentials`.
    """
    try:
        parts = urlsplit(url)
        options = parse_qsl(parts.query, keep_blank_values=True)
    except ValueError as error:
        raise InvalidValue(field, without_secrets(url), f"must be a URL ({error})") from None
    servers = [value for name, value in options if name in ("endpoint", "domain")]
    if _USER.search(url.partition("?")[0]) or any("@" in server for server in servers):
        raise InvalidValue(field, without_secrets(url), f"must not hold credentials; set them in {credentials}")
    names = [name for name, _ in options]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidValue(field, without_secrets(url), f"must give each option once, {', '.join(twice)} too")
    return parts, dict(options)


def without_secrets(urls: str) -> str:
    """Return one or more URLs as messages show them: without users, passwords, and values of unknown options."""
    return _OPTION.sub(_redacted, _USER.sub("", urls))


def _redacted(option: re.Match[str]) -> str:
    name, value = option.groups()
    return option[0] if name in _PUBLIC and not _HAS_USER.search(value) else f"{name}=…"


def counted(number: int, what: str) -> str:
    """Return a number of things as text: '1 step', '2 steps'."""
    return f"{number} {what}" + ("" if number == 1 else "s")


def time_text(seconds: float) -> str:
    """Return a time in words, to two digits or so."""
    if seconds < 90:
        return f"{number_text(seconds, 0) if seconds < 0.95 else f'{seconds:.0f}'} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def usd_text(usd: float) -> str:
    """Return dollars to cents, or to two digits below ten cents."""
    return f"{usd:.2f}" if usd >= 0.1 or not usd else f"{usd:.2g}" if usd >= 1e-4 else number_text(usd, 6)


def number_text(value: float, decimals: int) -> str:
    """Return a number with so many decimals, or as many more as it takes to show two digits that count; zero is "0"."""
    if not value or not math.isfinite(value):
        return f"{value:.0f}"
    if abs(value) < 1e-9:
        return f"{value:.1e}"
    return f"{value:.{max(decimals, 1 - math.floor(math.log10(abs(value))))}f}"


class Described:
    """A value that Python and notebooks display as the room `show` describes it, which is above this one.

    Functions have no `show`: there it is displayed by its class alone.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        try:
            from funcpipe.show.notebook import as_text
        except ModuleNotFoundError:
            return object.__repr__(self)
        return as_text(self)

    def _repr_html_(self) -> str:
        from funcpipe.show.notebook import as_html

        return as_html(self)
