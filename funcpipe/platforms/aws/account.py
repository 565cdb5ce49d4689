"""An account of AWS in one region: its clients, its quotas, and its errors in words that say what to do."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    EndpointConnectionError,
    HTTPClientError,
    NoCredentialsError,
    NoRegionError,
    ProfileNotFound,
)

from funcpipe.core.cached import cached_property
from funcpipe.errors import FuncPipeError, InputError, InvalidValue, PlatformBusy, PlatformError, PlatformRefused
from funcpipe.platforms.shared.cloud import Capacity
from funcpipe.platforms.shared.known_errors import EXPIRED, SKEWED, KnownError, error_of, remedy_for_credentials

_COMMON = "docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html and IAM's CommonErrors.html, 2026-11"
_INVOKE = "docs.aws.amazon.com/lambda/latest/api/API_Invoke.html, 2026-11"
_MORE = "request more in the console under Service Quotas, or destroy what is not needed"
_DENIED = (
    "ask for the permission, or deploy as a user who has it: docs/aws.md lists what deploy needs, "
    "`funcpipe deploy aws --print-deployer-policy` prints it as a policy"
)
_KNOWN = (
    EXPIRED,
    SKEWED,
    KnownError(
        code=r"^(InvalidClientTokenId|UnrecognizedClientException|SignatureDoesNotMatch|InvalidSignatureException|"
        r"InvalidAccessKeyId)$",
        remedy="the credentials are not valid (any more): log in again",
        general=True,
        source=_COMMON,
    ),
    KnownError(
        code=r"^(AccessDenied(Exception)?|UnauthorizedOperation|AuthorizationError)$", remedy=_DENIED, source=_COMMON
    ),
    KnownError(
        code=r"^(RequestTooLargeException|(Serialized)?RequestEntityTooLargeException)$",
        remedy="an invocation carries at most 1 MB: fewer layers after profile --set model.layers=N",
        source=_INVOKE,
    ),
    KnownError(code=r"^(TooManyRequests|EC2Throttled|ResourceNotReady|Service)Exception$", source=_INVOKE),
    KnownError(
        code=r"^(Account|Service)?(Limit|Quota)ExceededException$",
        remedy=_MORE,
        general=True,
        source="docs.aws.amazon.com/codebuild/latest/APIReference/API_StartBuild.html, "
        "docs.aws.amazon.com/AWSCloudFormation/latest/APIReference/API_CreateStack.html and "
        f"{_INVOKE}",
    ),
    KnownError(
        code=r"^CodeStorageExceededException$",
        remedy=_MORE,
        general=True,
        source="docs.aws.amazon.com/lambda/latest/api/API_CreateFunction.html, 2026-11",
    ),
    KnownError(
        code=r"^TooManyBuckets$",
        remedy=_MORE,
        general=True,
        source="docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html, 2026-11",
    ),
    KnownError(
        code=r"^(Throttling(Exception)?|ThrottledException|RequestThrottled(Exception)?|RequestLimitExceeded|SlowDown|"
        r"ServiceUnavailable(Exception)?|InternalFailure|InternalError|InternalServerError)$",
        source=f"{_COMMON}; botocore.retries.standard has most of them",
    ),
)
_THROTTLES = {
    "ConcurrentInvocationLimitExceeded": "the account's concurrency is used up",
    "ReservedFunctionConcurrentInvocationLimitExceeded": "the function's reserved concurrency is used up",
    "FunctionInvocationRateLimitExceeded": "the function is invoked too often",
    "ReservedFunctionInvocationRateLimitExceeded": "the function is invoked too often for its reserved concurrency",
    "CallerRateLimitExceeded": "too many requests of this account",
    "ConcurrentSnapshotCreateLimitExceeded": "the account makes too many snapshots of functions",
}
"""The reasons of a TooManyRequestsException: the `Reason` beside it (the type ThrottleReason of Lambda's API)."""


NO_REGION = (
    "the region is not known: give it in the URL, as in aws-lambda://NAME?region=eu-central-1, in "
    "the environment, as AWS_REGION, in a profile of the AWS command, or by "
    "--region, which deploy, destroy and logs have"
)


class Account:
    """An account in one region. Credentials come from where boto3 finds them.

    `endpoint` stands for every service, for tests; requests that fail for now are made again.
    """

    def __init__(self, *, region: str | None = None, endpoint: str | None = None) -> None:
        self._endpoint = endpoint
        self._clients: dict[str, Any] = {}
        with explained("opening a session"):
            self._session = boto3.session.Session(region_name=region)
        found = region or self._session.region_name
        if found is None:
            raise InputError(NO_REGION)
        known = [
            name
            for partition in self._session.get_available_partitions()
            for name in self._session.get_available_regions("lambda", partition_name=partition)
        ]
        if endpoint is None and found not in known:
            raise InvalidValue("region", found, f"must be one of {', '.join(known)}")
        self.region: str = found

    def client(self, service: str) -> Any:
        """Return the client of one service, made when it is first asked for."""
        if service not in self._clients:
            retries = {"mode": "standard", "total_max_attempts": 5}
            self._clients[service] = self._session.client(
                service,
                region_name=self.region,
                endpoint_url=self._endpoint,
                config=Config(retries=retries, connect_timeout=10, read_timeout=60),
            )
        return self._clients[service]

    @property
    def partition(self) -> str:
        """The part of AWS that the region is in, as ARNs name it: `aws`, `aws-cn`, `aws-us-gov`."""
        return str(self._session.get_partition_for_region(self.region))

    @cached_property
    def number(self) -> str:
        """The account's number; raises PlatformRefused without valid credentials."""
        with explained("asking whose credentials these are"):
            return str(self.client("sts").get_caller_identity()["Account"])


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """Within the context, errors of AWS become PlatformRefused where the caller can help, else PlatformError.

    Those that pass become PlatformBusy.
    """
    try:
        yield
    except ClientError as error:
        raise _of_client(doing, error) from error
    except NoCredentialsError as error:
        raise PlatformRefused(
            f"{doing}: there are no credentials for AWS; run `aws configure`, or set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY"
        ) from error
    except (NoRegionError, ProfileNotFound) as error:
        raise PlatformRefused(f"{doing}: {error}") from error
    except EndpointConnectionError as error:
        raise PlatformBusy(f"{doing}: {error}; is the region right, and this machine on line?") from error
    except (ConnectionError, HTTPClientError) as error:
        raise PlatformBusy(f"{doing}: {error}") from error
    except BotoCoreError as error:
        raise PlatformError(f"{doing}: {error}") from error


def advice(text: str) -> str | None:
    """Return advice about a message of AWS, if known; messages of a stack hold those of other services."""
    low = text.lower()
    if "not authorized to perform" in low or "accessdenied" in low or "access denied" in low:
        return _DENIED
    if "memorysize" in low and "less than or equal to" in low:
        return (
            "this account's functions have at most that much memory: ask AWS Support for more, "
            "or plan with --max-memory and deploy those sizes"
        )
    if "function not found" in low:
        return "deploy again, with that size among --sizes"
    if "image size" in low or "image too large" in low:
        return "an image has at most 10 GB unpacked: take packages out of --requirements"
    if "builds in queue" in low:
        return (
            f"deploy where docker runs, or ask AWS Support for '{BUILDS.name}' of CodeBuild ({BUILDS.code}): Service "
            "Quotas may show more than a new account can start"
        )
    if "quota" in low or "limit exceeded" in low or "limitexceeded" in low or "toomanybuckets" in low:
        return _MORE
    return None


def _of_client(doing: str, error: ClientError) -> FuncPipeError:
    answer = error.response
    code, message = answer["Error"]["Code"], answer["Error"].get("Message", "")
    why = _THROTTLES.get(answer.get("Reason", ""))
    text = f"{doing}: {code}: {message}" + (f" ({why})" if why else "")
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    remedy = remedy_for_credentials(code, message) or advice(message)
    return error_of(_KNOWN, text, code=code, status=status, remedy=remedy)


# docs.aws.amazon.com/lambda/latest/dg/gettingstarted-limits.html and codebuild/latest/userguide/limits.html, 2026-11;
# the codes of quotas are those that Service Quotas has
_USUAL_FUNCTIONS = 1000
_NEW_MB = 3008


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """A quota of an account in a region."""

    service: str
    code: str
    name: str

    def request(self, wanted: int, region: str) -> str:
        """Return the advice to raise it."""
        return (
            f"request {wanted} of the quota '{self.name}': aws service-quotas request-service-quota-increase "
            f"--service-code {self.service} --quota-code {self.code} --desired-value {wanted} --region {region}"
        )


CONCURRENCY = Quota(service="lambda", code="L-B99A9384", name="Concurrent executions")
BUILDS = Quota(service="codebuild", code="L-2DC20C30", name="Concurrently running builds for Linux/Medium environment")


def account_capacity(needed: int, unreserved: int, region: str) -> Capacity:
    """Return the capacity of the functions that share what no function of the account has reserved."""
    return Capacity(
        needed=needed,
        allowed=unreserved,
        limit=f"this account may run {unreserved} in {region}",
        fewer="plan with --max-functions",
        more=lambda wanted: CONCURRENCY.request(wanted, region),
    )


def reserved_capacity(name: str, needed: int, reserved: int, region: str) -> Capacity:
    """Return the capacity of a function with reserved concurrency."""
    return Capacity(
        needed=needed,
        allowed=reserved,
        limit=f"{name} may run {reserved} times, its reserved concurrency in {region}",
        more=lambda wanted: (
            f"reserve {wanted}: aws lambda put-function-concurrency --function-name {name} "
            f"--reserved-concurrent-executions {wanted} --region {region}"
        ),
    )


def notices(functions: int, memory_mb: tuple[int, ...], region: str) -> Iterator[str]:
    """Yield warnings about functions of these sizes in an account that may run so many at once."""
    if functions >= _USUAL_FUNCTIONS:
        return
    yield (
        f"this account may run {functions} functions at once in {region}: plan with --max-functions {functions}, "
        f"or {CONCURRENCY.request(_USUAL_FUNCTIONS, region)}"
    )
    large = [str(memory) for memory in memory_mb if memory > _NEW_MB]
    if large:
        yield (
            f"accounts with so few often admit functions of at most {_NEW_MB} MB, which no quota tells: if those of "
            f"{', '.join(large)} MB fail, plan with --max-memory {_NEW_MB}, or ask AWS Support for more in {region}"
        )
