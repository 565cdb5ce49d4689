"""The parts of a deployment on Function Compute, in the terms of its API and of Serverless Devs, its tool."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from funcpipe.core import FunctionSize, PlatformSpec, WatchSpec, checks, to_text
from funcpipe.core.settings import KEEP_DAYS, LEAST_KEEP_DAYS
from funcpipe.errors import InvalidValue
from funcpipe.platforms.aliyun.account import function_name, platform_url, watchdog_name
from funcpipe.platforms.aliyun.cards import card_of
from funcpipe.platforms.aliyun.resources import LOG_STORE
from funcpipe.platforms.shared.cloud import SECRET
from funcpipe.platforms.shared.deployment import DataBucket
from funcpipe.platforms.shared.package import Package, make_package

PORT = 9000
RUNS = "runs"
"""The prefix of the bucket under which runs keep their objects."""

_MOST_LIFETIME_S = 86_400
_QUEUED_S = 300  # a task that could not start by then is given up
_MOST_VCPU, _MOST_MEMORY_MB, _MEMORY_STEP_MB = 16.0, 32_768, 64
_MEMORY_RULE = (
    f"must be 128 to {_MOST_MEMORY_MB} MB, the most of functions without a GPU, in steps of {_MEMORY_STEP_MB}"
)
_VCPU_STEP = 0.05


MOST_GPU_IMAGE_BYTES = 15 * 1024**3
"""The largest image of a function with a GPU; the vendor's quotas of 2026 say 30 GB, those of 2024 15."""
_WATCHDOG_VCPU, _WATCHDOG_MB = 0.25, 256
_WATCHDOG_S = 240  # several times what it takes until a silent function counts as lost
TIMER = "every-minute"
"""The name of the trigger that invokes the watchdog."""

_HOOK_S = 300  # the longest that an Initializer hook may take

_COMMAND = ("python", "-m", "funcpipe.platforms.entry_aliyun")

Node = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A deployment: its name, the sizes of its functions, the repository of their image (without a tag).

    With a `watchdog`, detached runs are watched every minute. Functions may read `data`. Objects of runs expire
    `keep_days` days after they were written. A repository of the Enterprise Edition lies in `registry_instance`.
    """

    name: str
    sizes: tuple[FunctionSize, ...]
    repository: str
    lifetime_s: int = _MOST_LIFETIME_S
    watchdog: bool = True
    data: tuple[DataBucket, ...] = ()
    keep_days: int = KEEP_DAYS
    registry_instance: str | None = None

    def __post_init__(self) -> None:
        checks.whole("keep_days", self.keep_days, LEAST_KEEP_DAYS)
        if not (self.name.isascii() and self.name.replace("-", "").isalnum() and self.name.islower()):
            raise InvalidValue("name", self.name, "must be small letters, digits and dashes")
        checks.filled("sizes", self.sizes)
        if "/" not in self.repository or ":" in self.repository.rpartition("/")[2]:
            raise InvalidValue(
                "repository",
                self.repository,
                "must be a repository without a tag, such as crpi-ID.REGION.personal.cr.aliyuncs.com/you/funcpipe",
            )
        if not 1 <= self.lifetime_s <= _MOST_LIFETIME_S:
            raise InvalidValue("lifetime_s", self.lifetime_s, "must be positive, and tasks run 24 hours at most")
        for size in self.sizes:
            _check(size)

    @property
    def has_gpus(self) -> bool:
        """True if some of its functions have a GPU."""
        return any(size.accelerator is not None for size in self.sizes)


def shape_of(
    spec: PlatformSpec,
    *,
    name: str,
    sizes: tuple[str, ...],
    repository: str,
    watchdog: bool = True,
    data: tuple[DataBucket, ...] = (),
    keep_days: int = KEEP_DAYS,
    registry_instance: str | None = None,
) -> Shape:
    """Return the deployment of the sizes of `spec` with these names."""
    return Shape(
        name=name,
        sizes=tuple(spec.size(size) for size in sizes),
        repository=repository,
        watchdog=watchdog,
        data=data,
        keep_days=keep_days,
        registry_instance=registry_instance,
    )


def container_package(extra: tuple[str, ...] = (), base: str | None = None, *, cuda: bool = False) -> Package:
    """Return the package of the image, on the image `base`; `extra` are requirements of the user's model.

    With `cuda` it has torch for GPUs.
    """
    return make_package(_COMMAND, ("oss2", "alibabacloud_fc20230330"), extra, base, cuda=cuda)


def function_properties(
    shape: Shape, size: FunctionSize, *, image: str, role: str, logs: Node | str, secret: str
) -> Node:
    """Return a function as the API takes it; `logs` says where it logs to.

    Its Initializer hook is a request to the container, `/initialize`; the hook's handler, the API's example, is unused.
    """
    card = card_of(size)
    gpu = {} if card is None else {"gpuConfig": {"gpuType": card.kind, "gpuMemorySize": card.memory_gb * 1024}}
    return {
        **_container(shape, image, role, logs, secret),
        **gpu,
        "functionName": function_name(shape.name, size.name),
        "cpu": size.vcpu,
        "memorySize": size.memory_mb,
        "timeout": shape.lifetime_s,
        "instanceLifecycleConfig": {"initializer": {"handler": "index.initializer", "timeout": _HOOK_S}},
    }


def watchdog_properties(shape: Shape, *, image: str, role: str, logs: Node | str, secret: str) -> Node:
    """Return the function that watches detached runs, as the API takes it: small, without the hook that loads torch."""
    return {
        **_container(shape, image, role, logs, secret),
        "functionName": watchdog_name(shape.name),
        "cpu": _WATCHDOG_VCPU,
        "memorySize": _WATCHDOG_MB,
        "timeout": _WATCHDOG_S,
    }


def _container(shape: Shape, image: str, role: str, logs: Node | str, secret: str) -> Node:
    """Return the properties that all functions have in common."""
    instance = {} if shape.registry_instance is None else {"acrInstanceId": shape.registry_instance}
    return {
        "runtime": "custom-container",
        "handler": "not-used",
        "diskSize": 512,
        "instanceConcurrency": 1,
        "internetAccess": True,
        "role": role,
        "logConfig": logs,
        "customContainerConfig": {"image": image, "port": PORT, **instance},
        "environmentVariables": {SECRET: secret},
    }


def timer_properties(storage: str, platform: str) -> Node:
    """Return the trigger of the watchdog, every minute, as the tool takes it: `triggerConfig` is no text yet."""
    config = {
        "cronExpression": "@every 1m",
        "enable": True,
        "payload": to_text(WatchSpec(storage=storage, platform=platform)),
    }
    return {"triggerName": TIMER, "triggerType": "timer", "qualifier": "LATEST", "triggerConfig": config}


def watchdog_events() -> Node:
    """Return the treatment of the timer's events: never retried, as the next one comes soon, and not kept as tasks."""
    return {"asyncTask": False, "maxAsyncRetryAttempts": 0, "maxAsyncEventAgeInSeconds": 60}


def log_properties(project: str) -> Node:
    """Return the log settings of functions, as the API takes them: lines alone, as metrics are paid apart."""
    return {
        "project": project,
        "logstore": LOG_STORE,
        "enableRequestMetrics": False,
        "enableInstanceMetrics": False,
        "logBeginRule": "None",
    }


def async_properties() -> Node:
    """Return the treatment of asynchronous events: tasks that can be watched and stopped, and never retried."""
    return {"asyncTask": True, "maxAsyncRetryAttempts": 0, "maxAsyncEventAgeInSeconds": _QUEUED_S}


def tool_template(shape: Shape, *, region: str, image: str, role: str, storage: str) -> str:
    """Return the `s.yaml` for Serverless Devs (`s deploy`), written as JSON, which YAML includes.

    The tool makes a project of the log service of its own, and takes the deployment's secret from the environment.
    `storage` is the URL by which functions open the bucket.
    """
    resources, secret = {}, f"${{env({SECRET})}}"
    for size in shape.sizes:
        properties = function_properties(shape, size, image=image, role=role, logs="auto", secret=secret)
        resources[properties["functionName"]] = {
            "component": "fc3",
            "props": {"region": region, **properties, "asyncInvokeConfig": async_properties()},
        }
    if shape.watchdog:
        properties = watchdog_properties(shape, image=image, role=role, logs="auto", secret=secret)
        timer = timer_properties(storage, platform_url(shape.name, region))
        events = {"asyncInvokeConfig": watchdog_events(), "triggers": [timer]}
        resources[properties["functionName"]] = {
            "component": "fc3",
            "props": {"region": region, **properties, **events},
        }
    value = {"edition": "3.0.0", "name": shape.name, "access": "default", "resources": resources}
    return json.dumps(value, indent=1) + "\n"


def trust() -> str:
    """Return the trust policy of the functions' role: Function Compute may take it."""
    statement = {"Effect": "Allow", "Action": "sts:AssumeRole", "Principal": {"Service": ["fc.aliyuncs.com"]}}
    return json.dumps({"Version": "1", "Statement": [statement]})


def rights(shape: Shape, bucket: str, region: str, account: str) -> str:
    """Return the rights of functions: to their runs' objects and their deployment's functions, to logs and the image.

    The log project is called after the bucket. Functions are named one by one, as another deployment's names may begin
    with this one's; below them are their tasks
    (alibabacloud.com/help/en/functioncompute/fc/policies-and-sample-policies, 2026-07).
    """
    names = [f"acs:fc:{region}:{account}:functions/{function_name(shape.name, size.name)}" for size in shape.sizes]
    statements: list[Mapping[str, object]] = [
        {
            "Effect": "Allow",
            "Action": ["oss:GetObject", "oss:PutObject", "oss:DeleteObject"],
            "Resource": [f"acs:oss:*:{account}:{bucket}/{RUNS}/*"],
        },
        {
            "Effect": "Allow",
            "Action": ["oss:ListObjects"],
            "Resource": [f"acs:oss:*:{account}:{bucket}"],
            "Condition": {"StringLike": {"oss:Prefix": [f"{RUNS}/*"]}},
        },
        {
            "Effect": "Allow",
            "Action": ["fc:InvokeFunction", "fc:GetAsyncTask", "fc:StopAsyncTask"],
            "Resource": [resource for name in names for resource in (name, f"{name}/*")],
        },
        {
            "Effect": "Allow",
            "Action": ["log:PostLogStoreLogs"],
            "Resource": [f"acs:log:{region}:{account}:project/{bucket}/logstore/*"],
        },
        *_pulling(shape.repository, region, account),
        *(statement for one in shape.data for statement in _reading(one, account)),
    ]
    return json.dumps({"Version": "1", "Statement": statements})


def _reading(data: DataBucket, account: str) -> list[Mapping[str, object]]:
    """Return the rights to read the objects of a bucket of data, and list them."""
    place = f"acs:oss:*:{account}:"
    return [
        {"Effect": "Allow", "Action": ["oss:GetObject"], "Resource": [place + data.objects]},
        {
            "Effect": "Allow",
            "Action": ["oss:ListObjects"],
            "Resource": [place + data.name],
            "Condition": {"StringLike": {"oss:Prefix": [data.below]}},
        },
    ]


def _pulling(repository: str, region: str, account: str) -> list[Mapping[str, object]]:
    """Return the rights that Function Compute needs as the role to get an image.

    The actions are those of AliyunFCDefaultRole (alibabacloud.com/help/doc-detail/181589.htm, 2025-01). Tokens are of
    all resources; repositories are named after their instance, in the Personal Edition without one
    (help.aliyun.com/en/acr/user-guide/ram-authorization-information, 2026-07).
    """
    path = repository.partition("/")[2]
    repositories = f"acs:cr:{region}:{account}:repository"
    return [
        {"Effect": "Allow", "Action": ["cr:GetAuthorizationToken"], "Resource": ["*"]},
        {
            "Effect": "Allow",
            "Action": ["cr:GetRepository", "cr:GetRepositoryTag", "cr:PullRepository"],
            "Resource": [f"{repositories}/{path}", f"{repositories}/*/{path}"],
        },
    ]


def expiry_rules(shape: Shape) -> Mapping[str, int]:
    """Return the days after which objects expire, by prefix."""
    return {f"{RUNS}/": shape.keep_days}


def _check(size: FunctionSize) -> None:
    """Raise InvalidValue for a size that Function Compute has not."""
    card = card_of(size)
    if card is not None:
        if not card.admits(size) or size.memory_mb % _MEMORY_STEP_MB:
            known = f"{_of(card.vcpu)} vCPU and {_of(card.host_mb)} MB"
            raise InvalidValue("size", size.name, f"must have, with a {card.kind}, {known}")
        return
    ratio = size.memory_mb / 1024 / size.vcpu
    steps = size.vcpu / _VCPU_STEP
    if size.memory_mb % _MEMORY_STEP_MB or not 128 <= size.memory_mb <= _MOST_MEMORY_MB:
        raise InvalidValue("memory", size.memory_mb, _MEMORY_RULE)
    if abs(steps - round(steps)) > 1e-6 or not _VCPU_STEP <= size.vcpu <= _MOST_VCPU:
        raise InvalidValue("vcpu", size.vcpu, f"must be 0.05 to {_MOST_VCPU:g} in steps of 0.05")
    if not 1 <= ratio <= 4:
        raise InvalidValue("size", size.name, "must have 1 to 4 GB of memory for each vCPU")


def _of(values: float | tuple[float, ...]) -> str:
    return " or ".join(f"{value:g}" for value in values) if isinstance(values, tuple) else f"at most {values:g}"
