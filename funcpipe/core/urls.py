"""URLs of storages and platforms: their parts, and how they are printed."""

import re
from urllib.parse import SplitResult, parse_qsl, urlsplit

from funcpipe.errors import InvalidValue

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
