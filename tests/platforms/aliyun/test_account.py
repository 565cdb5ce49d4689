"""What answers of Alibaba Cloud are to funcpipe: to be tried again, to be mended by the caller, or neither."""

import pytest
from alibabacloud_tea_openapi.exceptions import AlibabaCloudException

from funcpipe.errors import FuncPipeError, PlatformBusy, PlatformError, PlatformRefused
from funcpipe.platforms.aliyun.account import explained

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
