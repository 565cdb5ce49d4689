"""Objects in a bucket of Amazon S3, or of any server that speaks its protocol, through boto3."""

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
)
from botocore.utils import parse_timestamp

from funcpipe.core import logs
from funcpipe.errors import InvalidValue, KeyExists, KeyMissing, PlatformRefused, StorageBusy, StorageError
from funcpipe.platforms.base import OPEN, Gate, batches
from funcpipe.platforms.shared.known_errors import remedy_for_credentials
from funcpipe.platforms.shared.objects import GatedBody, raise_errors, require_one_put

_log = logging.getLogger(__name__)

_MISSING = {"NoSuchKey", "404", "NotFound"}
_EXISTS = {"PreconditionFailed", "412"}
_BUSY = {
    *("SlowDown", "RequestTimeout", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests"),
    *("ConditionalRequestConflict", "OperationAborted"),
}
_SERVER_ERRORS = {"InternalError", "ServiceUnavailable"}
_OUT_OF_RANGE = {"InvalidRange", "416"}
_UNVERSIONED = "null"

_DIRECTORY_BUCKET = "--x-s3"  # how the names of buckets of S3 Express One Zone end; docs/storage.md has the differences


class S3Storage:
    """Keys below `prefix` in `bucket`, at `endpoint` or at Amazon's. Credentials come from where boto3 finds them.

    Every request is made once: a failure that may pass is StorageBusy, for others to try again. So is a server that is
    silent for `timeout_s`. Messages carry their own checksums; those of boto3 are left out, since they halve its
    throughput.
    """

    watches = False

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        endpoint: str | None = None,
        region: str | None = None,
        timeout_s: float = 30,
    ) -> None:
        self._bucket = bucket
        self._is_directory = bucket.endswith(_DIRECTORY_BUCKET)
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._warned = False
        core = botocore.session.get_session()
        core.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=_timestamp)
        session = boto3.session.Session(botocore_session=core)
        if self._is_directory and endpoint is None and (region or session.region_name) is None:
            raise InvalidValue("storage", f"s3://{bucket}", "is a directory bucket; add its region: ?region=REGION")
        self._client: Any = session.client(
            "s3",
            endpoint_url=endpoint,
            region_name=region or (None if endpoint is None else "us-east-1"),
            config=Config(
                retries={"total_max_attempts": 1},
                max_pool_connections=64,
                connect_timeout=min(timeout_s, 10),
                read_timeout=timeout_s,
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                s3={"payload_signing_enabled": False, "addressing_style": "auto" if endpoint is None else "path"},
            ),
        )

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        """Write an object; with `if_absent`, raise KeyExists rather than replace one."""
        require_one_put(self._where(key), data)
        condition = {"IfNoneMatch": "*"} if if_absent else {}
        with self._errors_of(key), GatedBody(data, gate) as body:
            answer = self._client.put_object(Bucket=self._bucket, Key=self._prefix + key, Body=body, **condition)
        if answer.get("VersionId", _UNVERSIONED) != _UNVERSIONED and not self._warned:
            self._warned = True
            _log.log(
                logging.INFO if logs.is_function() else logging.WARNING,
                "the bucket %s keeps versions: what runs delete or replace stays there, and is paid for, until a "
                "lifecycle rule with NoncurrentVersionExpiration removes it",
                self._bucket,
            )

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        """Return the bytes [start, stop) of an object; raises KeyMissing."""
        wanted = {} if start == 0 and stop is None else {"Range": _range(start, stop)}
        with self._errors_of(key):
            try:
                answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + key, **wanted)
            except ClientError as error:
                if error.response["Error"]["Code"] in _OUT_OF_RANGE:
                    return b""
                raise
            with gate:
                data: bytes = answer["Body"].read()
        return data if stop is None else data[: max(stop - start, 0)]

    def delete(self, key: str) -> None:
        """Remove an object; a missing key is not an error."""
        with self._errors_of(key):
            self._client.delete_object(Bucket=self._bucket, Key=self._prefix + key)

    def delete_many(self, keys: Sequence[str]) -> None:
        """Remove objects, a thousand with each request; missing keys are not an error."""
        errors: list[StorageError] = []
        for batch in batches(keys):
            objects = [{"Key": self._prefix + key} for key in batch]
            with self._errors_of(batch[0]):
                answer = self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True})
            errors += [self._undeleted(**error) for error in answer.get("Errors", ())]
        raise_errors(errors, len(keys))

    def list(self, prefix: str) -> tuple[str, ...]:
        """Return the keys that begin with `prefix`, sorted; in a directory bucket, its whole folder is asked for."""
        return tuple(sorted(self.etags(prefix)))

    def etags(self, prefix: str) -> Mapping[str, str]:
        """Return the keys that begin with `prefix`, and the ETags that S3 lists with them."""
        begins = self._prefix + prefix
        asked = begins[: begins.rfind("/") + 1] if self._is_directory else begins
        with self._errors_of(prefix):
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=asked)
            found = [(item["Key"], item["ETag"]) for page in pages for item in page.get("Contents", ())]
        return {key[len(self._prefix) :]: etag for key, etag in found if key.startswith(begins)}

    def touch(self, key: str) -> None:
        """Copy an object onto itself; raises KeyMissing.

        S3 refuses such a copy unless something changes, and so its metadata, which is nothing, is replaced by nothing.
        What one put has written is not too large for it (5 GB:
        docs.aws.amazon.com/AmazonS3/latest/API/API_CopyObject.html, 2026-11).
        """
        place = {"Bucket": self._bucket, "Key": self._prefix + key}
        with self._errors_of(key):
            self._client.copy_object(**place, CopySource=place, MetadataDirective="REPLACE")

    def wait(self, key: str, timeout_s: float, cancel: threading.Event) -> None:
        """Pause for `timeout_s`, or until `cancel` is set: a bucket does not notify."""
        cancel.wait(timeout_s)

    def _where(self, key: str) -> str:
        return f"s3://{self._bucket}/{self._prefix}{key}"

    @contextmanager
    def _errors_of(self, key: str) -> Iterator[None]:
        try:
            yield
        except ClientError as error:
            raise self._explained(key, error) from error
        except NoCredentialsError as error:
            raise PlatformRefused(
                f"s3://{self._bucket}: there are no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                "or configure them as for the AWS command line"
            ) from error
        except (HTTPClientError, ConnectionError, IncompleteReadError) as error:
            raise StorageBusy(f"{self._where(key)}: {error}") from error
        except BotoCoreError as error:
            raise StorageError(f"{self._where(key)}: {error}") from error

    def _undeleted(self, *, Key: str, Code: str, Message: str = "", **_: str) -> StorageError:
        """Return the reason why one object of a batch was not deleted; the words are those of the answer."""
        passing = Code in _BUSY or Code in _SERVER_ERRORS
        return (StorageBusy if passing else StorageError)(f"s3://{self._bucket}/{Key}: {Code}: {Message}")

    def _explained(self, key: str, error: ClientError) -> StorageError:
        code = error.response["Error"]["Code"]
        status = error.response["ResponseMetadata"]["HTTPStatusCode"]
        if code in _MISSING:
            return KeyMissing(key)
        if code in _EXISTS:
            return KeyExists(key)
        message = error.response["Error"].get("Message", "")
        remedy = remedy_for_credentials(code, message)
        text = f"{self._where(key)}: {code} ({status}): {message}" + (f"; {remedy}" if remedy else "")
        busy = (status >= 500 and code != "NotImplemented") or status == 429 or code in _BUSY
        return StorageBusy(text) if busy else StorageError(text)


def _timestamp(value: Any) -> Any:
    """Return a time in an answer as botocore does, whose parser takes most of the time of a listing."""
    try:
        return datetime.fromisoformat(value) if "T" in value else parse_timestamp(value)
    except (TypeError, ValueError):
        return parse_timestamp(value)


def _range(start: int, stop: int | None) -> str:
    if start < 0:
        return f"bytes={start}"
    return f"bytes={start}-" if stop is None else f"bytes={start}-{max(stop - 1, start)}"
