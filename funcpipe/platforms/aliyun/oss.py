"""Objects in a bucket of Alibaba Cloud OSS, through oss2."""

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import oss2
import requests

from funcpipe.errors import KeyExists, KeyMissing, StorageBusy, StorageError
from funcpipe.platforms.base import OPEN, Gate, batches
from funcpipe.platforms.shared.known_errors import remedy_for_credentials
from funcpipe.platforms.shared.objects import GatedBody, raise_errors, require_one_put

_OUT_OF_RANGE = 416
_BUSY = {"RequestTimeout", "OperationAborted", "QpsLimitExceeded"}

FORBIDDEN = "PublicEndpointForbidden"
"""The error for accounts since 2025-03-20 that ask for objects in mainland China by the public endpoint.

They may make and remove buckets. alibabacloud.com/help/en/object-storage-service/latest/map-custom-domain-names-1,
2025-12.
"""

ONE_COPY_BYTES = 2**30
"""The size that one copy surely takes; the documentation has the limit for copies between buckets, or for all of them.

alibabacloud.com/help/en/oss/developer-reference/copyobject, 2025-12, and uploadpartcopy, 2026-09.
"""

_BY_DOMAIN = (
    "accounts that activated OSS after 2025-03-20 reach objects in mainland China from outside only by a custom domain "
    "of the bucket: map one and add &domain=https://… to the platform's URL, or write it for endpoint=… in the "
    "storage's; or deploy elsewhere, such as in ap-southeast-1: docs/aliyun.md"
)


class OssStorage:
    """Keys below `prefix` in `bucket`, at `endpoint` in `region`; with `cname`, that is a custom domain of the bucket.

    Credentials are the environment's OSS_ACCESS_KEY_ID, OSS_ACCESS_KEY_SECRET and, if need be, OSS_SESSION_TOKEN.
    Every request is made once: a failure that may pass is StorageBusy, for others to try again. So is a server that is
    silent for `timeout_s`.
    """

    watches = False

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        endpoint: str,
        region: str,
        cname: bool = False,
        path_style: bool = False,
        timeout_s: float = 30,
    ) -> None:
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._name = f"oss://{bucket}"
        with self._errors_of(""):
            credentials = oss2.credentials.EnvironmentVariableCredentialsProvider()
        self._bucket: Any = oss2.Bucket(
            oss2.ProviderAuthV4(credentials),
            endpoint,
            bucket,
            session=oss2.Session(pool_size=64),
            connect_timeout=timeout_s,
            enable_crc=False,
            region=region,
            is_cname=cname,
            is_path_style=path_style,
        )

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        """Write an object; with `if_absent`, raise KeyExists rather than replace one."""
        require_one_put(self._where(key), data)
        headers = {"x-oss-forbid-overwrite": "true"} if if_absent else {}
        with self._errors_of(key), GatedBody(data, gate) as body:
            self._bucket.put_object(self._prefix + key, body, headers=headers)

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        """Return the bytes [start, stop) of an object; raises KeyMissing."""
        wanted: Mapping[str, Any] = {}
        if start != 0 or stop is not None:
            last = None if stop is None else max(stop - 1, start)
            wanted = {
                "byte_range": (start, last) if start >= 0 else (None, -start),
                "headers": {"x-oss-range-behavior": "standard"},
            }
        with self._errors_of(key):
            try:
                answer = self._bucket.get_object(self._prefix + key, **wanted)
            except oss2.exceptions.ServerError as error:
                if error.status == _OUT_OF_RANGE:
                    return b""
                raise
            with gate:
                data: bytes = answer.read()
            if answer.content_length is not None and len(data) != answer.content_length:
                raise StorageBusy(f"{self._where(key)}: the body broke off after {len(data)} bytes")
        return data if stop is None else data[: max(stop - start, 0)]

    def delete(self, key: str) -> None:
        """Remove an object; a missing key is not an error."""
        with self._errors_of(key):
            self._bucket.delete_object(self._prefix + key)

    def delete_many(self, keys: Sequence[str]) -> None:
        """Remove objects, a thousand with each request; missing keys are not an error."""
        left: list[str] = []
        for batch in batches(keys):
            wanted = [self._prefix + key for key in batch]
            with self._errors_of(batch[0]):
                answer = self._bucket.batch_delete_objects(wanted)
            left += sorted(set(wanted) - set(answer.deleted_keys))
        raise_errors([StorageBusy(f"{self._name}/{key}: OSS has not deleted it") for key in left], len(keys))

    def list(self, prefix: str) -> tuple[str, ...]:
        """Return the keys that begin with `prefix`, sorted."""
        return tuple(sorted(self.etags(prefix)))

    def etags(self, prefix: str) -> Mapping[str, str]:
        """Return the keys that begin with `prefix`, and the ETags that OSS lists with them."""
        with self._errors_of(prefix):
            found = oss2.ObjectIteratorV2(self._bucket, prefix=self._prefix + prefix, max_keys=1000, max_retries=1)
            return {item.key[len(self._prefix) :]: item.etag for item in found}

    def touch(self, key: str) -> None:
        """Copy an object onto itself, in parts if it is too large for one copy; raises KeyMissing."""
        name = self._prefix + key
        with self._errors_of(key):
            try:
                self._bucket.copy_object(
                    self._bucket.bucket_name, name, name, headers={"x-oss-metadata-directive": "REPLACE"}
                )
            except oss2.exceptions.ServerError as error:
                size = self._bucket.head_object(name).content_length if error.status == 400 else 0
                if size <= ONE_COPY_BYTES:
                    raise
                self._copy_in_parts(name, size)

    def _copy_in_parts(self, name: str, size: int) -> None:
        upload = self._bucket.init_multipart_upload(name).upload_id
        try:
            parts = []
            for number, first in enumerate(range(0, size, ONE_COPY_BYTES), start=1):
                span = first, min(first + ONE_COPY_BYTES, size) - 1
                copied = self._bucket.upload_part_copy(self._bucket.bucket_name, name, span, name, upload, number)
                parts.append(oss2.models.PartInfo(number, copied.etag))
            self._bucket.complete_multipart_upload(name, upload, parts)
        except BaseException:
            with contextlib.suppress(oss2.exceptions.OssError):  # as functions, whose bucket lets parts expire
                self._bucket.abort_multipart_upload(name, upload)
            raise

    def wait(self, key: str, timeout_s: float, cancel: threading.Event) -> None:
        """Pause for `timeout_s`, or until `cancel` is set: a bucket does not notify."""
        cancel.wait(timeout_s)

    def _where(self, key: str) -> str:
        return f"{self._name}/{self._prefix}{key}"

    @contextmanager
    def _errors_of(self, key: str) -> Iterator[None]:
        where = self._where(key)
        try:
            yield
        except oss2.exceptions.NoSuchKey:
            raise KeyMissing(key) from None
        except oss2.exceptions.ServerError as error:
            if error.code == "FileAlreadyExists":
                raise KeyExists(key) from None
            text = f"{where}: {error.code} ({error.status}): {error.message}"
            remedy = _BY_DOMAIN if error.code == FORBIDDEN else remedy_for_credentials(error.code, error.message)
            if remedy is not None:
                raise StorageError(f"{text}; {remedy}") from error
            fails = error.status >= 500 and error.code != "NotImplemented"
            busy = fails or error.status == 429 or error.code in _BUSY
            raise (StorageBusy(text) if busy else StorageError(text)) from error
        except oss2.exceptions.RequestError as error:
            raise StorageBusy(f"{where}: {error.exception}") from error
        except requests.RequestException as error:  # while the body is read
            raise StorageBusy(f"{where}: {error}") from error
        except oss2.exceptions.OssError as error:
            raise StorageError(f"{where}: {error}") from error
