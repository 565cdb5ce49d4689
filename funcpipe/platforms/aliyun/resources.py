"""The bucket of a deployment, through oss2, and its project of the Simple Log Service, by its API of 2020-12-30.

Requests are signed as alibabacloud.com/help/en/sls/developer-reference/request-signatures has it (HMAC-SHA1).
"""

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from email.utils import formatdate
from typing import Any

import oss2
import requests
from oss2.models import (
    AbortMultipartUpload,
    BucketLifecycle,
    LifecycleExpiration,
    LifecycleRule,
    NoncurrentVersionExpiration,
)

from funcpipe.errors import PlatformBusy, PlatformError, PlatformRefused
from funcpipe.platforms.aliyun.account import Account, service_error
from funcpipe.platforms.aliyun.oss import FORBIDDEN


class Bucket:
    """A bucket, which may not exist yet. Credentials are those of the account."""

    def __init__(self, name: str, *, endpoint: str, region: str) -> None:
        self.name = name
        credentials = oss2.credentials.EnvironmentVariableCredentialsProvider()
        self._bucket: Any = oss2.Bucket(
            oss2.ProviderAuthV4(credentials), endpoint, name, region=region, connect_timeout=30, enable_crc=False
        )

    def ensure(self, expiry_days: Mapping[str, int]) -> bool:
        """Create the bucket and the expiry of its objects unless both exist; returns True if anything was changed."""
        try:
            changed = False
            if not self.exists():
                self._bucket.create_bucket(oss2.BUCKET_ACL_PRIVATE)
                changed = True
            rules = BucketLifecycle([_rule(*item) for item in expiry_days.items()])
            if self._lifecycle() != oss2.xml_utils.to_put_bucket_lifecycle(rules):
                self._bucket.put_bucket_lifecycle(rules)
                changed = True
        except oss2.exceptions.OssError as error:
            raise _explained(self.name, error) from error
        return changed

    def remove(self) -> None:
        """Delete the bucket and all it holds; none is no error."""
        try:
            if self.exists():
                self._remove()
        except oss2.exceptions.OssError as error:
            raise _explained(self.name, error) from error

    def _remove(self) -> None:
        try:
            self._bucket.delete_bucket()  # which is allowed where objects cannot be reached
        except oss2.exceptions.BucketNotEmpty:
            for item in oss2.ObjectIteratorV2(self._bucket, max_keys=1000):
                self._bucket.delete_object(item.key)
            self._bucket.delete_bucket()

    def exists(self) -> bool:
        """Return True if the account has it."""
        try:
            self._bucket.get_bucket_info()
        except oss2.exceptions.NoSuchBucket:
            return False
        return True

    def _lifecycle(self) -> bytes | None:
        """Return the bucket's rules as they would be written, None without any."""
        try:
            rules = self._bucket.get_bucket_lifecycle().rules
        except oss2.exceptions.NoSuchLifecycle:
            return None
        written: bytes = oss2.xml_utils.to_put_bucket_lifecycle(BucketLifecycle(rules))
        return written


def _rule(prefix: str, days: int) -> LifecycleRule:
    """Objects expire after so many days; old versions, and parts of uploads that were never completed, after one."""
    return LifecycleRule(
        prefix.strip("/").replace("/", "-"),
        prefix,
        status=LifecycleRule.ENABLED,
        expiration=LifecycleExpiration(days=days),
        abort_multipart_upload=AbortMultipartUpload(days=1),
        noncurrent_version_expiration=NoncurrentVersionExpiration(1),
    )


def _explained(name: str, error: oss2.exceptions.OssError) -> PlatformError | PlatformRefused:
    text = f"oss://{name}: {error.code} ({error.status}): {error.message}"
    if error.code == "BucketAlreadyExists":
        return PlatformRefused(f"{text}; the name belongs to another account: deploy with another --name")
    if error.code == FORBIDDEN:
        return PlatformRefused(f"{text}; empty the bucket in the console, then repeat the command: docs/aliyun.md")
    if error.status == 403:
        return PlatformRefused(f"{text}; ask for the permission: docs/aliyun.md lists what deploy needs")
    return PlatformError(text)


LOG_STORE = "functions"
"""The log store, in the deployment's project, that functions log to."""

LOG_DAYS = 14
_API = "0.6.0"
_PAGE = 100  # GetLogs returns no more at once
_ASK_AGAIN, _PAUSE_S = 30, 1.0
_TIMEOUT_S = (10, 60)
_DELIMITERS = list(" \n\t\r,;[]{}()&^*#@=:\"'")
_MISSING = ("ProjectNotExist", "LogStoreNotExist", "IndexConfigNotExist")


class LogService:
    """A log project, which may not exist yet."""

    def __init__(self, account: Account, project: str, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._account = account
        self._sleep = sleep
        self._project = project
        protocol, _, host = (account.endpoint or f"https://{account.region}.log.aliyuncs.com").partition("://")
        self._host = f"{project}.{host}"
        self._url = f"{protocol}://{host if account.endpoint else self._host}"  # tests' has no subdomains

    def ensure(self, store: str, *, days: int) -> bool:
        """Create the project, its log store with entries for `days`, and its index; return True if anything changed."""
        project = {"projectName": self._project, "description": "funcpipe: what functions log"}
        made = self._ensure("/", "/", project)
        kept = {"logstoreName": store, "ttl": days, "shardCount": 1, "autoSplit": False}  # one shard keeps the order
        made |= self._ensure(f"/logstores/{store}", "/logstores", kept)
        words = {"token": _DELIMITERS, "caseSensitive": True}
        index = {"line": words, "keys": {"instanceID": {"type": "text", **words}}}
        return made | self._ensure(f"/logstores/{store}/index", f"/logstores/{store}/index", index)

    def remove(self) -> None:
        """Delete the project with all its logs; none is no error."""
        self._call("DELETE", "/")

    def search(self, store: str, query: str, *, since_s: int, until_s: int) -> Iterator[Mapping[str, str]]:
        """Yield the log entries in [since_s, until_s) that match `query`, oldest first."""
        wanted = {"type": "log", "from": since_s, "to": until_s, "query": query, "line": _PAGE, "reverse": "false"}
        offset = 0
        while entries := self._page(f"/logstores/{store}", wanted | {"offset": offset}):
            yield from entries
            offset += len(entries)

    def _page(self, path: str, wanted: Mapping[str, object]) -> Sequence[Mapping[str, str]]:
        """One page of GetLogs, requested again until the service says that its search is complete."""
        for _ in range(_ASK_AGAIN):
            answer = self._call("GET", path, wanted)
            if answer is None:
                return []
            if answer.headers.get("x-log-progress") == "Complete":
                entries: list[Mapping[str, str]] = answer.json()
                return entries
            self._sleep(_PAUSE_S)
        raise PlatformError(f"the log project {self._project}: a search is not complete after {_ASK_AGAIN} requests")

    def _ensure(self, path: str, making: str, body: object) -> bool:
        if self._call("GET", path) is not None:
            return False
        for _ in range(_ASK_AGAIN):
            if self._call("POST", making, body=body) is not None:
                return True
            self._sleep(_PAUSE_S)  # a project that was just made is not everywhere yet
        raise PlatformError(
            f"the log project {self._project} is not there {_ASK_AGAIN * _PAUSE_S:g} s after it was made"
        )

    def _call(
        self, method: str, path: str, query: Mapping[str, object] | None = None, body: object = None
    ) -> requests.Response | None:
        """Return the answer; None where the path names nothing that exists."""
        data = b"" if body is None else json.dumps(body).encode()
        words = {name: str(value) for name, value in (query or {}).items()}
        headers = self._signed(method, path, words, data)
        doing = f"the log project {self._project}"
        try:
            answer = requests.request(
                method, self._url + path, params=words, data=data, headers=headers, timeout=_TIMEOUT_S
            )
        except requests.RequestException as error:
            raise PlatformBusy(f"{doing}: {error}; is the region right, and this machine on line?") from error
        if answer.ok:
            return answer
        code, message = _error_of(answer)
        if code in _MISSING:
            return None
        raise service_error(doing, code, message, status=answer.status_code)

    def _signed(self, method: str, path: str, query: Mapping[str, str], data: bytes) -> dict[str, str]:
        keys = self._account.keys
        headers = {
            "x-log-apiversion": _API,
            "x-log-bodyrawsize": str(len(data)),
            "x-log-signaturemethod": "hmac-sha1",
        } | ({"x-acs-security-token": keys.token} if keys.token else {})
        signed = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
        digest = hashlib.md5(data, usedforsecurity=False).hexdigest().upper() if data else ""
        kind, date = "application/json" if data else "", formatdate(usegmt=True)
        resource = path + ("?" + "&".join(f"{name}={query[name]}" for name in sorted(query)) if query else "")
        text = f"{method}\n{digest}\n{kind}\n{date}\n{signed}{resource}"
        signature = base64.b64encode(hmac.digest(keys.secret.encode(), text.encode(), "sha1")).decode()
        sent = {"Content-MD5": digest, "Content-Type": kind} if data else {}
        return {
            **headers,
            **sent,
            "Date": date,
            "Host": self._host,
            "Authorization": f"LOG {keys.name}:{signature}",
        }


def _error_of(answer: requests.Response) -> tuple[str, str]:
    try:
        answered: Any = answer.json()
        return str(answered["errorCode"]), str(answered["errorMessage"])
    except (ValueError, KeyError, TypeError):
        return str(answer.status_code), answer.reason or "no reason was given"
