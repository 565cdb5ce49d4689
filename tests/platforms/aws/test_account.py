"""What answers of AWS are to funcpipe: to be tried again, to be mended by the caller, or neither."""

from typing import Any

import pytest
from botocore.exceptions import ClientError, ConnectTimeoutError, EndpointConnectionError, ReadTimeoutError

from funcpipe.errors import FuncPipeError, InvalidValue, PlatformBusy, PlatformError, PlatformRefused
from funcpipe.platforms.aws.account import Account, explained


def answer(status: int, code: str, message: str, reason: str | None = None) -> ClientError:
    response: Any = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(response | ({"Reason": reason} if reason else {}), "Invoke")


BUSY = [
    (answer(429, "TooManyRequestsException", "Rate Exceeded.", reason), words)
    for reason, words in {
        "ConcurrentInvocationLimitExceeded": "the account's concurrency is used up",
        "ReservedFunctionConcurrentInvocationLimitExceeded": "the function's reserved concurrency is used up",
        "FunctionInvocationRateLimitExceeded": "the function is invoked too often",
        "ReservedFunctionInvocationRateLimitExceeded": "too often for its reserved concurrency",
        "CallerRateLimitExceeded": "too many requests of this account",
    }.items()
] + [
    (answer(502, "EC2ThrottledException", "EC2 throttled Lambda"), "EC2ThrottledException"),
    (answer(500, "ServiceException", "The Lambda service encountered an internal error."), "internal error"),
    (answer(400, "ThrottlingException", "Rate exceeded"), "Rate exceeded"),
    (answer(400, "Throttling", "Rate exceeded"), "Rate exceeded"),
    (answer(503, "ServiceUnavailable", "The service is unavailable. Please retry."), "unavailable"),
    (answer(503, "503", "Service Unavailable"), "Service Unavailable"),
    (EndpointConnectionError(endpoint_url="https://lambda"), "is the region right"),
    (ConnectTimeoutError(endpoint_url="https://lambda"), "Connect timeout"),
    (ReadTimeoutError(endpoint_url="https://lambda"), "Read timeout"),
]
REFUSED = [
    (answer(403, "ExpiredTokenException", "The security token included in the request is expired"), "log in again"),
    (answer(403, "SignatureDoesNotMatch", "The request signature we calculated does not match"), "not valid"),
    (answer(403, "RequestTimeTooSkewed", "The difference between the request time and the current"), "timedatectl"),
    (
        answer(403, "SignatureDoesNotMatch", "Signature expired: 20261127T101500Z is now earlier than 20261127T1"),
        "the clock of this machine is minutes off",
    ),
    (
        answer(403, "InvalidSignatureException", "Signature not yet current: 20261127T104500Z is still later than"),
        "the clock of this machine is minutes off",
    ),
    (
        answer(403, "AccessDeniedException", "User: u is not authorized to perform: lambda:InvokeFunction"),
        "docs/aws.md",
    ),
    (answer(413, "RequestTooLargeException", "1048577 byte payload is too large"), "at most 1 MB"),
    (answer(400, "CodeStorageExceededException", "Code storage limit exceeded."), "Service Quotas"),
    (answer(402, "ServiceQuotaExceededException", "exceeded"), "Service Quotas"),
    (answer(400, "AccountLimitExceededException", "Cannot have more than 0 builds in queue"), "Service Quotas"),
    (
        answer(400, "InvalidParameterValueException", "'MemorySize' value failed: less than or equal to 3008"),
        "at most that much memory",
    ),
]
OTHERS = [
    (answer(400, "InvalidParameterValueException", "no"), "InvalidParameterValueException: no"),
    (answer(404, "ResourceNotFoundException", "there is no log group"), "no log group"),
    (answer(400, "RecursiveInvocationException", "stopped"), "RecursiveInvocationException"),
]


@pytest.mark.parametrize(
    ("error", "words", "kind"),
    [(error, words, PlatformBusy) for error, words in BUSY]
    + [(error, words, PlatformRefused) for error, words in REFUSED]
    + [(error, words, PlatformError) for error, words in OTHERS],
)
def test_an_answer_tells_whether_to_try_again(error: Exception, words: str, kind: type[FuncPipeError]) -> None:
    with pytest.raises(FuncPipeError) as told, explained("invoking f"):
        raise error
    assert type(told.value) is kind
    assert str(told.value).startswith("invoking f: ")
    assert words in str(told.value)


@pytest.mark.parametrize(
    ("region", "partition", "endpoint"),
    [
        ("eu-central-1", "aws", "https://cloudformation.eu-central-1.amazonaws.com"),
        ("cn-northwest-1", "aws-cn", "https://cloudformation.cn-northwest-1.amazonaws.com.cn"),
        ("us-gov-west-1", "aws-us-gov", "https://cloudformation.us-gov-west-1.amazonaws.com"),
    ],
)
def test_regions_of_china_and_of_the_government_are_known_with_their_partition(
    region: str, partition: str, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    account = Account(region=region)
    assert account.partition == partition
    assert account.client("cloudformation").meta.endpoint_url == endpoint


def test_a_region_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(InvalidValue, match=r"must be one of .*eu-central-1.*cn-north-1.*us-gov-west-1"):
        Account(region="eu-central-9")
