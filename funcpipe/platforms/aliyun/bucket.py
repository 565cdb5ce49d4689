"""The bucket of a deployment, through oss2."""

from collections.abc import Mapping
from typing import Any

import oss2
from oss2.models import (
    AbortMultipartUpload,
    BucketLifecycle,
    LifecycleExpiration,
    LifecycleRule,
    NoncurrentVersionExpiration,
)

from funcpipe.errors import PlatformError, PlatformRefused
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
