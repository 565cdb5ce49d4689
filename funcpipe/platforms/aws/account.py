"""An account of AWS in one region: its clients, and its errors in words that say what to do."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    EndpointConnectionError,
    NoCredentialsError,
    NoRegionError,
    ProfileNotFound,
)

from funcpipe.errors import FuncPipeError, InvalidValue, PlatformError, PlatformRefused
from funcpipe.platforms.aws.quotas import BUILDS

_DENIED = {"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "AuthorizationError"}
_UNKNOWN = {"InvalidClientTokenId", "UnrecognizedClientException", "ExpiredToken", "ExpiredTokenException"}
_UNKNOWN |= {"SignatureDoesNotMatch", "InvalidSignatureException", "InvalidAccessKeyId"}
_TOO_MANY = {
    "AccountLimitExceededException",
    "LimitExceededException",
    "ServiceQuotaExceededException",
    "TooManyBuckets",
    "TooManyRequestsException",
}
_TOO_LARGE = {"RequestTooLargeException", "RequestEntityTooLargeException"}


class Account:
    """Who is at work, and where. Credentials come from where boto3 finds them.

    `endpoint` stands for every service, for tests; requests that fail for now are made again.
    """

    def __init__(self, *, region: str | None = None, endpoint: str | None = None) -> None:
        self._endpoint = endpoint
        self._clients: dict[str, Any] = {}
        with explained("opening a session"):
            self._session = boto3.session.Session(region_name=region)
        found = region or self._session.region_name
        if found is None:
            raise InvalidValue("region", found, "must be given: --region, AWS_REGION or the profile's")
        known = self._session.get_available_regions("lambda")
        if endpoint is None and found not in known:
            raise InvalidValue("region", found, f"must be one of {', '.join(known)}")
        self.region: str = found

    def client(self, service: str) -> Any:
        """The client of one service, made when it is first asked for."""
        if service not in self._clients:
            retries = {"mode": "standard", "total_max_attempts": 5}
            self._clients[service] = self._session.client(
                service,
                region_name=self.region,
                endpoint_url=self._endpoint,
                config=Config(retries=retries, connect_timeout=10, read_timeout=60),
            )
        return self._clients[service]

    @cached_property
    def number(self) -> str:
        """The account's number; raises PlatformRefused without valid credentials."""
        with explained("asking whose credentials these are"):
            return str(self.client("sts").get_caller_identity()["Account"])


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """Within the context, errors of AWS become PlatformRefused where the caller can help, else PlatformError."""
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
        raise PlatformError(f"{doing}: {error}; is the region right, and this machine on line?") from error
    except BotoCoreError as error:
        raise PlatformError(f"{doing}: {error}") from error


def advice(text: str) -> str | None:
    """What to do about a message of AWS, where we know; messages of a stack hold those of other services."""
    low = text.lower()
    if "not authorized to perform" in low or "accessdenied" in low or "access denied" in low:
        return (
            "ask for the permission, or deploy as somebody who has it: docs/aws.md lists what deploy needs, "
            "`funcpipe deploy aws --print-deployer-policy` prints it as a policy"
        )
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
        return "request more in the console under Service Quotas, or destroy what is not needed"
    return None


def _of_client(doing: str, error: ClientError) -> FuncPipeError:
    code, message = error.response["Error"]["Code"], error.response["Error"].get("Message", "")
    text = f"{doing}: {code}: {message}"
    if code in _UNKNOWN:
        return PlatformRefused(f"{text}; the credentials are not valid (any more): log in again")
    if code in _DENIED:
        return PlatformRefused(f"{text}; {advice('access denied')}")
    if code in _TOO_LARGE:
        return PlatformRefused(f"{text}; an invocation carries at most 1 MB: fewer layers after profile --layers")
    found = advice(message) or (advice("quota") if code in _TOO_MANY else None)
    return PlatformError(text) if found is None else PlatformRefused(f"{text}; {found}")
