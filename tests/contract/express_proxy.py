"""A directory bucket of S3 Express One Zone: a proxy before a server of general-purpose buckets, as strict as Express.

It opens sessions, refuses what the documentation says is refused, and lists keys in an order that is not
lexicographical: docs.aws.amazon.com/AmazonS3/latest/userguide/s3-express-differences.html, and the pages of the API.
"""

import hashlib
import secrets
from datetime import UTC, datetime, timedelta
from http.client import HTTPConnection
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from tests.contract.faulty_proxy import Exchange, FaultyProxy
from tests.support.waiting import LONG_S

BUCKET = "funcpipe-contract--use1-az4--x-s3"
PAGE = 100
"""Keys of a page of a list: fewer than 1000, as the documentation allows, so that there are several."""

_UNSUPPORTED = ("x-amz-acl", "x-amz-tagging", "x-amz-tagging-directive", "x-amz-website-redirect-location")
_NAMESPACE = "{http://s3.amazonaws.com/doc/2006-03-01/}"


class ExpressProxy(FaultyProxy):
    """Passes requests for BUCKET on to the bucket `behind` of `upstream`."""

    def __init__(self, upstream: str, behind: str) -> None:
        super().__init__(upstream)
        self.RequestHandlerClass = ExpressExchange
        self.behind = behind
        self.sessions: dict[str, str] = {}
        self.folders_listed: list[str] = []


class ExpressExchange(Exchange):
    """One request to a directory bucket."""

    server: ExpressProxy

    def handle_request(self) -> None:
        self.close_connection = True
        parts = urlsplit(self.path)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        query = {name: values[-1] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        if bucket != BUCKET:
            self.refuse(404, "NoSuchBucket", f"there is no bucket {bucket}")
        elif "session" in query:
            self.open_session()
        elif (reason := self.objection(key, query)) is not None:
            self.refuse(*reason)
        elif query.get("list-type") == "2":
            self.list_objects(query)
        else:
            self.path = parts._replace(path=quote(f"/{self.server.behind}/{key}")).geturl()
            if "x-amz-copy-source" in self.headers:
                source = self.headers["x-amz-copy-source"].removeprefix(f"{BUCKET}/")
                self.headers.replace_header("x-amz-copy-source", f"{self.server.behind}/{source}")
            self.relay()

    do_GET = do_PUT = do_DELETE = do_POST = do_HEAD = handle_request

    def objection(self, key: str, query: dict[str, str]) -> tuple[int, str, str] | None:
        """Why Express refuses the request: status, code and words."""
        refused = self.unsigned()
        if refused is not None:
            return 403, "AccessDenied", refused
        for name in _UNSUPPORTED:
            if name in self.headers:
                return 400, "InvalidRequest", f"{name} is not supported by directory buckets"
        if self.command == "GET" and not key and query.get("list-type") != "2":
            return 400, "InvalidRequest", "directory buckets are listed by ListObjectsV2"
        if not query.get("prefix", "/").endswith("/") and query["prefix"]:
            return 400, "InvalidRequest", "a prefix must end in the delimiter"
        if query.get("delimiter", "/") != "/" or "start-after" in query:
            return 400, "InvalidRequest", "another delimiter than / and start-after are not supported"
        if self.command == "PUT" and "content-md5" in self.headers:
            return 400, "InvalidRequest", "content-md5 is not supported by directory buckets"
        sums = [name for name in self.headers if name.lower().startswith(("x-amz-checksum-", "content-md5"))]
        if "delete" in query and not sums:
            return 400, "InvalidRequest", "deleting many objects needs a checksum"
        return None

    def unsigned(self) -> str | None:
        """What is wrong with the signature: a copy has IAM's credentials, says its page, all else a session's."""
        token, signed = self.headers.get("x-amz-s3session-token", ""), self.headers.get("Authorization", "")
        of_express = "/s3express/aws4_request" in signed
        if "x-amz-copy-source" in self.headers:
            return None if of_express and not token else "a copy is signed for s3express with lasting credentials"
        if token not in self.server.sessions or "x-amz-security-token" in self.headers:
            return "a request needs the token of a session, and no other"
        if f"Credential={self.server.sessions[token]}/" not in signed or not of_express:
            return "a request is signed for s3express with the key of its session"
        return None

    def refuse(self, status: int, code: str, words: str) -> None:
        self.answer_xml(status, f"<Error><Code>{code}</Code><Message>{words}</Message></Error>")

    def open_session(self) -> None:
        """For who signs with lasting credentials, for five minutes."""
        if "/s3express/aws4_request" not in self.headers.get("Authorization", ""):
            self.refuse(403, "AccessDenied", "sessions are opened by requests that are signed for s3express")
            return
        token, access_key = secrets.token_hex(16), f"SESSION{secrets.token_hex(6)}"
        self.server.sessions[token] = access_key
        until = (datetime.now(UTC) + timedelta(minutes=5)).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.answer_xml(
            200,
            f"<CreateSessionResult><Credentials><SessionToken>{token}</SessionToken><SecretAccessKey>of it"
            f"</SecretAccessKey><AccessKeyId>{access_key}</AccessKeyId><Expiration>{until}</Expiration></Credentials>"
            "</CreateSessionResult>",
        )

    def list_objects(self, query: dict[str, str]) -> None:
        """A page of keys by the order of their hashes; a token tells the last one before it."""
        prefix, after = query.get("prefix", ""), query.get("continuation-token", "")
        self.server.folders_listed.append(prefix)
        behind = self.etags_behind(prefix)
        placed = sorted((hashlib.sha256(key.encode()).hexdigest(), key) for key in behind)
        left = [(place, key) for place, key in placed if place > after]
        page = left[: min(int(query.get("max-keys", PAGE)), PAGE)]
        more = len(left) > len(page)
        contents = "".join(
            f"<Contents><Key>{escape(quote(key))}</Key><ETag>{escape(behind[key])}</ETag><Size>0</Size></Contents>"
            for _, key in page
        )
        token = f"<NextContinuationToken>{page[-1][0]}</NextContinuationToken>" if more else ""
        self.answer_xml(
            200,
            f'<ListBucketResult xmlns="{_NAMESPACE[1:-1]}"><Name>{BUCKET}</Name>'
            f"<Prefix>{escape(quote(prefix))}</Prefix>"
            f"<KeyCount>{len(page)}</KeyCount><MaxKeys>{PAGE}</MaxKeys><EncodingType>url</EncodingType>"
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{contents}</ListBucketResult>",
        )

    def etags_behind(self, prefix: str) -> dict[str, str]:
        found: dict[str, str] = {}
        asked = {"list-type": "2", "prefix": prefix}
        while True:
            connection = HTTPConnection(self.server.upstream, timeout=LONG_S)
            connection.request("GET", f"/{self.server.behind}?{urlencode(asked)}")
            page = ElementTree.fromstring(connection.getresponse().read())
            connection.close()
            for item in page.findall(f"{_NAMESPACE}Contents"):
                found[item.findtext(f"{_NAMESPACE}Key", "")] = item.findtext(f"{_NAMESPACE}ETag", "")
            token = page.findtext(f"{_NAMESPACE}NextContinuationToken")
            if token is None:
                return found
            asked["continuation-token"] = token

    def answer_xml(self, status: int, text: str) -> None:
        self.answer(status, [("Content-Type", "application/xml")], text.encode())
