"""Signatures of requests to Alibaba Cloud: ACS3-HMAC-SHA256, after the documentation of its API."""

import hashlib
import hmac
import re
from email.message import Message
from urllib.parse import parse_qsl, quote, urlsplit

from tests.contract.oss_server import ACCESS_KEY, SECRET_KEY


def is_signed(method: str, url: str, headers: Message, body: bytes) -> bool:
    """Whether the request has the signature that its contents call for, with the tests' key."""
    given = re.fullmatch(
        r"ACS3-HMAC-SHA256 Credential=(\S+),SignedHeaders=(\S+),Signature=(\S+)",
        headers["Authorization"] or "",
    )
    if given is None or given[1] != ACCESS_KEY:
        return False
    digest = hashlib.sha256(body).hexdigest()
    names = given[2].split(";")
    query = sorted(parse_qsl(urlsplit(url).query, keep_blank_values=True))
    canonical = "\n".join(
        (
            method,
            urlsplit(url).path,
            "&".join(f"{quote(k, safe='~')}={quote(v, safe='~')}" for k, v in query),
            "".join(f"{name}:{(headers[name] or '').strip()}\n" for name in names),
            given[2],
            headers["x-acs-content-sha256"],
        )
    )
    text = "ACS3-HMAC-SHA256\n" + hashlib.sha256(canonical.encode()).hexdigest()
    right = hmac.new(SECRET_KEY.encode(), text.encode(), hashlib.sha256).hexdigest()
    return right == given[3] and headers["x-acs-content-sha256"] == digest
