"""Refusals of storages for credentials and clocks say what to do, whatever is requested."""

from collections.abc import Callable
from typing import Any

import oss2
import pytest
from botocore.stub import Stubber

from funcpipe.errors import StorageBusy, StorageError
from funcpipe.platforms.aliyun.oss import OssStorage
from funcpipe.platforms.aws.s3 import S3Storage
from funcpipe.platforms.base import Storage

EXPIRED = "the temporary credentials have expired: log in again, or set new ones, and resume what was running"
SKEWED = "the clock of this machine is minutes off: set it, as by `timedatectl set-ntp true`"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> S3Storage:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-this-test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-this-test")
    return S3Storage("bucket", region="eu-central-1")


@pytest.fixture
def oss(monkeypatch: pytest.MonkeyPatch) -> OssStorage:
    monkeypatch.setenv("OSS_ACCESS_KEY_ID", "of-this-test")
    monkeypatch.setenv("OSS_ACCESS_KEY_SECRET", "of-this-test")
    return OssStorage("bucket", endpoint="https://oss-cn-hangzhou.aliyuncs.com", region="cn-hangzhou")


@pytest.mark.parametrize(
    ("code", "message", "remedy"),
    [
        ("ExpiredToken", "The provided token has expired.", EXPIRED),
        ("RequestTimeTooSkewed", "The difference between the request time and the server's time is too large", SKEWED),
        ("SignatureDoesNotMatch", "Signature expired: 20261127T101500Z is now earlier than 20261127T102000Z", SKEWED),
        ("AccessDenied", "Access Denied", ""),
    ],
    ids=["expired", "skewed", "signature", "denied"],
)
@pytest.mark.parametrize("method", ["put_object", "get_object", "list_objects_v2"])
def test_s3(code: str, message: str, remedy: str, method: str, s3: S3Storage) -> None:
    with Stubber(s3._client) as stubber:
        stubber.add_client_error(method, code, message, http_status_code=403)
        assert (
            refusal_of(s3, method.partition("_")[0])
            == f"s3://bucket/key: {code} (403): {message}{remedy and '; '}{remedy}"
        )


@pytest.mark.parametrize(
    ("code", "message", "remedy"),
    [
        ("SecurityTokenExpired", "The security token you provided has expired.", EXPIRED),
        ("RequestTimeTooSkewed", "The difference between the request time and the current time is too large.", SKEWED),
        ("AccessDenied", "denied", ""),
    ],
    ids=["expired", "skewed", "denied"],
)
@pytest.mark.parametrize("method", ["put_object", "get_object"])
def test_oss(
    code: str, message: str, remedy: str, method: str, oss: OssStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        kinds: Any = oss2.exceptions
        raise kinds.ServerError(403, {}, "", {"Code": code, "Message": message})

    monkeypatch.setattr(oss._bucket, method, refuse)
    assert (
        refusal_of(oss, method.partition("_")[0])
        == f"oss://bucket/key: {code} (403): {message}{remedy and '; '}{remedy}"
    )


def refusal_of(store: Storage, request: str) -> str:
    """The message of a request that is refused."""
    asked: dict[str, Callable[[], object]] = {
        "put": lambda: store.put("key", b"1"),
        "get": lambda: store.get("key"),
        "list": lambda: store.list("key"),
    }
    with pytest.raises(StorageError) as error:
        asked[request]()
    assert not isinstance(error.value, StorageBusy)
    return str(error.value)
