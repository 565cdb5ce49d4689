"""What answers of Alibaba Cloud are to funcpipe: to be tried again, to be mended by the caller, or neither."""

import re

import pytest
from alibabacloud_tea_openapi.exceptions import AlibabaCloudException

from funcpipe.errors import FuncPipeError, PlatformBusy, PlatformError, PlatformRefused
from funcpipe.platforms.aliyun.account import Account, explained

ANSWERS = [
    (429, "ResourceExhausted", PlatformBusy, ""),
    (503, "ResourceThrottled", PlatformBusy, ""),
    (500, "InternalServerError", PlatformBusy, ""),
    (409, "ConcurrentUpdateError", PlatformBusy, ""),
    (499, "ClientClosedRequest", PlatformBusy, ""),
    (400, "Throttling.User", PlatformBusy, ""),
    (503, "ServiceUnavailable", PlatformBusy, ""),
    (502, "None", PlatformBusy, ""),
    (400, "LimitExceededError", PlatformRefused, "Quota Center"),
    (409, "LimitExceeded.Role", PlatformRefused, "Quota Center"),
    (403, "SignatureNotMatch", PlatformRefused, "set new ones"),
    (403, "InvalidAccessKeyID", PlatformRefused, "set new ones"),
    (404, "InvalidAccessKeyId.NotFound", PlatformRefused, "set new ones"),
    (400, "InvalidSecurityToken.Expired", PlatformRefused, "have expired: log in again"),
    (400, "InvalidTimeStamp.Expired", PlatformRefused, "the clock of this machine is minutes off"),
    (403, "AccessDenied", PlatformRefused, "docs/aliyun.md"),
    (400, "EntityTooLarge", PlatformRefused, "at most 128 KB"),
    (404, "AsyncTaskNotFound", PlatformError, ""),
    (400, "InvalidArgument", PlatformError, ""),
]


@pytest.mark.parametrize(("status", "code", "kind", "words"), ANSWERS)
def test_an_answer_tells_whether_to_try_again(status: int, code: str, kind: type[FuncPipeError], words: str) -> None:
    with pytest.raises(FuncPipeError) as told, explained("invoking f"):
        raise AlibabaCloudException(status_code=status, code=code, message="why")
    assert type(told.value) is kind
    assert str(told.value).startswith(f"invoking f: {code}: why")
    assert words in str(told.value)


def test_every_region_s_endpoint_is_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK's table has a tab behind one of them."""
    for name in ("OSS_ACCESS_KEY_ID", "OSS_ACCESS_KEY_SECRET"):
        monkeypatch.setenv(name, "test")
    regions = Account(region="ap-southeast-5").functions._endpoint_map
    assert len(regions) > 20
    endpoints = {region: Account(region=region).functions._endpoint for region in regions}
    assert endpoints["ap-southeast-5"] == "fcv3.ap-southeast-5.aliyuncs.com"
    assert {host for host in endpoints.values() if not re.fullmatch(r"[a-z0-9.-]+\.aliyuncs\.com", host)} == set()
