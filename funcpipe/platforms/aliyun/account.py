"""An account of Alibaba Cloud in one region: its clients, names of what a deployment has there, its errors in words."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from alibabacloud_fc20230330 import models
from alibabacloud_fc20230330.client import Client as FunctionClient
from alibabacloud_tea_openapi.client import Client as OpenClient
from alibabacloud_tea_openapi.utils_models import Config, OpenApiRequest, Params
from darabonba.exceptions import DaraException, UnretryableException
from darabonba.policy.retry import RetryOptions
from darabonba.runtime import RuntimeOptions

from funcpipe.core.cached import cached_property
from funcpipe.errors import FuncPipeError, InputError, InvalidValue, PlatformBusy, PlatformRefused
from funcpipe.platforms.shared.known_errors import EXPIRED, SKEWED, KnownError, error_of

_CLOUD, _PERSONAL, _ENTERPRISE = ".aliyuncs.com", ".personal.cr.aliyuncs.com", ".cr.aliyuncs.com"
WATCHDOG = "-watchdog"
"""The suffix of the name of the function that watches detached runs."""


def function_name(deployment: str, size: str) -> str:
    """Return the name of the function of a size."""
    return f"{deployment}-{size.replace('.', '_')}"


def watchdog_name(deployment: str) -> str:
    """Return the name of the function that watches detached runs."""
    return f"{deployment}{WATCHDOG}"


def bucket_name(deployment: str, account: str, region: str) -> str:
    """Return the name of a deployment's bucket; names of buckets are shared by all accounts."""
    return f"{deployment}-{account}-{region}"


def role_name(deployment: str, region: str) -> str:
    """Return the role of a deployment's functions, and its policy; roles are of all regions."""
    return f"{deployment}-functions-{region}"


def roles_of(deployment: str, region: str) -> tuple[str, ...]:
    """Return the possible names of a deployment's role; before 2026-11 it was one for all regions."""
    return role_name(deployment, region), f"{deployment}-functions"


def platform_url(deployment: str, region: str, *, endpoint: str | None = None, domain: str | None = None) -> str:
    """Return the URL by which `catalog.open_platform` opens a deployment."""
    options = {"endpoint": endpoint, "domain": domain}
    return f"aliyun-fc://{deployment}?region={region}" + "".join(f"&{k}={v}" for k, v in options.items() if v)


def storage_url(bucket: str, region: str, *, internal: bool) -> str:
    """Return the URL of runs' objects: over the network of the data centre for functions, from outside for clients."""
    return storage_at(bucket, region, oss_endpoint(region, internal=internal))


def storage_at(bucket: str, region: str, endpoint: str) -> str:
    """Return the URL of runs' objects by an endpoint of OSS."""
    return f"oss://{bucket}/runs?endpoint={endpoint}&region={region}"


def storage_by_domain(bucket: str, region: str, domain: str) -> str:
    """Return the URL of runs' objects by a custom domain of the bucket."""
    return f"oss://{bucket}/runs?domain={domain}&region={region}"


def oss_endpoint(region: str, *, internal: bool) -> str:
    """Return the endpoint of OSS in a region."""
    return f"https://oss-{region}{'-internal' if internal else ''}.aliyuncs.com"


def check_registry(repository: str, region: str, instance: str | None) -> None:
    """Raise InvalidValue for a repository of another region than the functions', or whose `instance` must be named.

    Addresses are crpi-ID.REGION.personal.cr.aliyuncs.com, of instances made before 2024-09 registry.REGION.aliyuncs.com
    or registry-intl.REGION.aliyuncs.com, and of the Enterprise Edition NAME-registry.REGION.cr.aliyuncs.com
    (alibabacloud.com/help/en/acr, 2026-03). Custom domains say nothing. Images are of the functions' region and account
    (alibabacloud.com/help/en/functioncompute, Create a Custom Container function, 2026-03), and those of the Enterprise
    Edition need the ID of their instance (CustomContainerConfig of the API of 2023-03-30, 2026-06).
    """
    host = repository.partition("/")[0]
    if not host.endswith(_CLOUD):
        return
    place = host.split(".")[1]
    if place != region:
        rule = f"must lie in {region}, where the functions are, not in {place}: make one there in Container Registry"
        raise InvalidValue("repository", repository, rule)
    if host.endswith(_ENTERPRISE) and not host.endswith(_PERSONAL) and instance is None:
        rule = (
            "is of the Enterprise Edition: name its instance, as the console shows it, with "
            "--set platform.registry-instance=cri-…"
        )
        raise InvalidValue("repository", repository, rule)


_READ_TIMEOUT_MS = 60_000
_RETRIES = RetryOptions(
    retryCondition=[
        {
            "maxAttempts": 5,
            "exception": ["RetryError"],  # the network
            "errorCode": [
                *("InternalServerError", "ResourceExhausted", "ResourceThrottled"),
                *("ServiceUnavailable", "Throttling", "Throttling.User"),
            ],
            "backoff": {"policy": "FullJitter", "period": 200, "cap": 5_000},
        }
    ]
)
_KEYS = ("OSS_ACCESS_KEY_ID", "OSS_ACCESS_KEY_SECRET")
_CODES = "alibabacloud.com/help/en/functioncompute/error-codes, 2026-09, and developer.aliyun.com/ask/279119"
_PUBLIC = "alibabacloud.com/help/en/openapi: common errors of gateways and of RAM, 2026-11"
_KNOWN = (
    EXPIRED,
    SKEWED,
    KnownError(
        code=r"^(InvalidAccessKeyI[dD]|Signature(DoesNot|Not)Match|InvalidSecurityToken|IncompleteSignature)",
        remedy="the credentials are not valid (any more): set new ones",
        source=f"{_CODES}; {_PUBLIC}",
    ),
    KnownError(
        code=r"AccessDenied|Unauthorized|NoPermission|Forbidden|ImplicitDeny",
        remedy="ask for the permission, or deploy as a user who has it: docs/aliyun.md lists what deploy needs",
        source=f"{_CODES}; {_PUBLIC}",
    ),
    KnownError(
        code=r"^EntityTooLarge$",
        remedy="an event carries at most 128 KB: fewer layers after profile --set model.layers=N",
        source=_CODES,
    ),
    KnownError(
        code=r"^(ResourceExhausted|ResourceThrottled|ConcurrentUpdateError|ClientClosedRequest|InternalServerError)$",
        source=_CODES,
    ),
    KnownError(code=r"^(Throttling|ServiceUnavailable|InternalError)", source=_PUBLIC),
    KnownError(
        code=r"Quota|LimitExceeded|TooMany",
        remedy="request more in the Quota Center, or destroy what is not needed",
        source=f"{_CODES}; {_PUBLIC}",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessKeys:
    """The key of an account, with the token of one that is temporary."""

    name: str
    secret: str = field(repr=False)
    token: str | None = field(repr=False)


NO_REGION = (
    "the region is not known: give it in the URL, as in aliyun-fc://NAME?region=cn-hangzhou, in the environment, as "
    "ALIBABA_CLOUD_REGION, or by --region, which deploy, destroy and logs have"
)


class Account:
    """An account in one region. Credentials are the environment's OSS_ACCESS_KEY_ID and OSS_ACCESS_KEY_SECRET.

    `endpoint`, a URL, stands for every service, for tests.
    """

    def __init__(self, *, region: str | None = None, endpoint: str | None = None) -> None:
        found = region or os.environ.get("ALIBABA_CLOUD_REGION")
        if not found:
            raise InputError(NO_REGION)
        if not all(os.environ.get(name) for name in _KEYS):
            raise PlatformRefused(
                f"there are no credentials for Alibaba Cloud; set {' and '.join(_KEYS)}, and "
                "OSS_SESSION_TOKEN if they are temporary"
            )
        self.region: str = found
        self.endpoint = endpoint
        self._protocol, _, self._host = (endpoint or "https://").partition("://")
        self._check_region()

    @cached_property
    def number(self) -> str:
        """The account's number."""
        with explained("asking whose credentials these are"):
            return str(self.call("sts", "GetCallerIdentity", "2015-04-01", {})["AccountId"])

    @property
    def keys(self) -> AccessKeys:
        """The environment's credentials."""
        name, secret = (os.environ[variable] for variable in _KEYS)
        return AccessKeys(name=name, secret=secret, token=os.environ.get("OSS_SESSION_TOKEN") or None)

    @cached_property
    def functions(self) -> Any:
        """The client of Function Compute."""
        client = FunctionClient(self._config(self._host or None))
        client._endpoint = client._endpoint.strip()  # in the SDK's table there is a tab behind that of ap-southeast-5
        return client

    def call(self, service: str, action: str, version: str, query: Mapping[str, str]) -> Mapping[str, Any]:
        """Call a service whose SDK is not needed for more, and return its answer."""
        params = Params(
            action=action,
            version=version,
            protocol=self._protocol.upper(),
            pathname="/",
            method="POST",
            auth_type="AK",
            style="RPC",
            req_body_type="formData",
            body_type="json",
        )
        client = OpenClient(self._config(self._host or f"{service}.aliyuncs.com"))
        answer: Mapping[str, Any] = client.call_api(params, OpenApiRequest(query=dict(query)), RuntimeOptions())["body"]
        return answer

    def deployed(self, name: str) -> Iterator[Any]:
        """Return the functions of a deployment, by their role: another deployment's name may begin with this one's."""
        roles, token = roles_of(name, self.region), None
        with explained(f"listing the functions of {name}"):
            while True:
                request = models.ListFunctionsRequest(prefix=f"{name}-", limit=100, next_token=token)
                answer = self.functions.list_functions(request).body
                for function in answer.functions or []:
                    if (function.role or "").rpartition("/")[2] in roles:
                        yield function
                token = answer.next_token
                if not token:
                    return

    def tasks(self, function: str, *, since_s: float) -> Iterator[Any]:
        """Yield the asynchronous tasks of a function that began at `since_s` or later."""
        since_ms, token = int(since_s * 1000), None
        while True:
            request = models.ListAsyncTasksRequest(started_time_begin=since_ms, limit=100, next_token=token)
            with explained(f"listing the tasks of {function}"):
                answer = self.functions.list_async_tasks(function, request).body
            yield from answer.tasks or []
            token = answer.next_token
            if not token:
                return

    def function_quotas(self) -> Iterator[tuple[str, int]]:
        """The functions that have a quota of instances of their own, which no other may use, with their quotas."""
        token = None
        while True:
            request = models.ListConcurrencyConfigsRequest(limit=100, next_token=token)
            answer = self.functions.list_concurrency_configs(request).body
            for config in answer.configs or []:
                yield config.function_arn.rpartition("/")[2], config.reserved_concurrency
            token = answer.next_token
            if not token:
                return

    def _config(self, endpoint: str | None) -> Config:
        keys = self.keys
        return Config(
            access_key_id=keys.name,
            access_key_secret=keys.secret,
            security_token=keys.token,
            region_id=self.region,
            endpoint=endpoint,
            protocol=self._protocol,
            connect_timeout=10_000,
            read_timeout=_READ_TIMEOUT_MS,
            retry_options=_RETRIES,
        )

    def _check_region(self) -> None:
        known = sorted(self.functions._endpoint_map) if self.endpoint is None else [self.region]
        if self.region not in known:
            raise InvalidValue("region", self.region, f"must be one of {', '.join(known)}")


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """Within the context, errors of the cloud become PlatformRefused where the caller can help, else PlatformError.

    Those that pass become PlatformBusy.
    """
    try:
        yield
    except DaraException as error:
        raise _of_service(doing, error) from error
    except (UnretryableException, OSError) as error:
        raise PlatformBusy(f"{doing}: {error}; is the region right, and this machine on line?") from error


def code_of(error: DaraException) -> str:
    """Return the code of an error of Alibaba Cloud; empty where it has none."""
    return str(getattr(error, "code", None) or "")


def service_error(doing: str, code: str, message: str, *, status: int) -> FuncPipeError:
    """Return funcpipe's error for one that a service of Alibaba Cloud has answered with."""
    return error_of(_KNOWN, f"{doing}: {code}: {message}", code=code, status=status, remedy=None)


def _of_service(doing: str, error: DaraException) -> FuncPipeError:
    text, status = str(getattr(error, "message", None) or error), getattr(error, "status_code", None) or 0
    return service_error(doing, code_of(error), text, status=status)
