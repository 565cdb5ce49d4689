"""Deployments on Alibaba Cloud, set up call by call and removed again. Both can be repeated safely."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from alibabacloud_fc20230330 import models
from darabonba.exceptions import DaraException

from funcpipe.core import PlatformSpec
from funcpipe.errors import PlatformRefused
from funcpipe.platforms.aliyun import template
from funcpipe.platforms.aliyun.account import (
    WATCHDOG,
    Account,
    bucket_name,
    check_registry,
    code_of,
    explained,
    oss_endpoint,
    platform_url,
    role_name,
    storage_at,
    storage_url,
)
from funcpipe.platforms.aliyun.resources import LOG_DAYS, LOG_STORE, Bucket, LogService
from funcpipe.platforms.aliyun.template import Shape
from funcpipe.platforms.shared.cloud import SECRET, new_secret
from funcpipe.platforms.shared.package import MOST_IMAGE_BYTES, Docker, Package

_RAM = "2015-05-01"
_ROTATE = "DeleteOldestNonDefaultVersionWhenLimitExceeded"  # a policy has at most 5 versions
_LEFT = ("Failed", "Inactive")
"""States in which a function stays until it is updated, as the service could not get its image or has let go of it.

help.aliyun.com/en/functioncompute/fc/user-guide/states-of-custom-container-functions, 2026-08.
"""
_MISSING = (
    "FunctionNotFound",
    "TriggerNotFound",
    "AsyncConfigNotExists",
    "AsyncInvokeConfigNotFound",
    "EntityNotExist",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """The result of a deployment."""

    name: str
    region: str
    bucket: str
    image: str
    functions: tuple[str, ...]
    keep_days: int

    @property
    def storage(self) -> str:
        """The URL of runs' objects from outside the data centre."""
        return storage_url(self.bucket, self.region, internal=False)

    def keeping_text(self, prices: PlatformSpec) -> str:
        """Return the cost of keeping it, in words."""
        note = prices.prices_note()
        return (
            "functions, role and the image in a personal registry cost nothing while nothing runs, a watchdog about "
            "$0.30 a month (platform.watchdog=false leaves it out); objects of runs are paid by OSS per GB and month "
            f"and expire after {self.keep_days} days, logs by the log service, after 14 days"
            + (f"; {note}" if note else "")
        )


class Deployer:
    """Creates, updates and removes the parts of a deployment. `say` is called with messages of progress."""

    def __init__(
        self, account: Account, *, say: Callable[[str], None], docker: Docker | None = None, oss: str | None = None
    ) -> None:
        self._account = account
        self._client: Any = account.functions
        self._say = say
        self._docker = docker or Docker()
        self._oss = oss or oss_endpoint(account.region, internal=False)
        self._oss_of_functions = oss or oss_endpoint(account.region, internal=True)

    def deploy(self, shape: Shape, package: Package) -> Deployed:
        """Create or update the parts of `shape`; what is up to date is left alone."""
        account = self._account
        if shape.has_gpus and not package.has_cuda:
            raise PlatformRefused("functions with a GPU need an image with CUDA, and this one has torch without it")
        check_registry(shape.repository, account.region, shape.registry_instance)
        bucket = bucket_name(shape.name, account.number, account.region)
        self._say(f"account {account.number}, region {account.region}, bucket {bucket}")
        if self._bucket(bucket).ensure(template.expiry_rules(shape)):
            self._say(f"made the bucket {bucket}")
        if LogService(account, bucket).ensure(LOG_STORE, days=LOG_DAYS):
            self._say(f"made the log project {bucket}")
        role = self._ensure_role(shape, bucket)
        image = self._ensure_image(shape, package)
        names = self._ensure_functions(shape, image, role)
        for name in set(self._functions(shape.name)) - set(names):
            self._delete_function(name)
        return Deployed(
            name=shape.name,
            region=account.region,
            bucket=bucket,
            image=image,
            functions=tuple(names),
            keep_days=shape.keep_days,
        )

    def destroy(self, name: str) -> None:
        """Remove everything that `deploy` made, with all that lies in it; nothing there is no error."""
        for function in self._functions(name):
            self._delete_function(function)
        role = role_name(name, self._account.region)
        policy = {"PolicyType": "Custom", "PolicyName": role}
        self._unless_missing("DetachPolicyFromRole", policy | {"RoleName": role})
        self._unless_missing("DeletePolicy", {"PolicyName": role, "CascadingDelete": "true"})
        self._unless_missing("DeleteRole", {"RoleName": role})
        bucket = bucket_name(name, self._account.number, self._account.region)
        self._bucket(bucket).remove()
        LogService(self._account, bucket).remove()
        self._say(f"removed {name} and all it held")

    def logs(self, name: str, *, since_s: float, containing: str | None = None) -> Iterator[str]:
        """Yield the states and errors of the asynchronous tasks since the time `since_s`, line by line."""
        for function in self._functions(name):
            for task in self._account.tasks(function, since_s=since_s):
                line = f"{function} {task.task_id} {task.status} {task.task_error_message or ''}".rstrip()
                if containing is None or containing in line:
                    yield line

    def _bucket(self, name: str) -> Bucket:
        return Bucket(name, endpoint=self._oss, region=self._account.region)

    def _ensure_role(self, shape: Shape, bucket: str) -> str:
        """Create or update the functions' role, with the policy of their rights; returns its name in full."""
        account = self._account
        role = role_name(shape.name, account.region)
        found = self._unless_missing("GetRole", {"RoleName": role})
        if found is None:
            self._say(f"making the role {role}")
            found = self._ram("CreateRole", {"RoleName": role, "AssumeRolePolicyDocument": template.trust()})
        self._ensure_policy(role, template.rights(shape, bucket, account.region, account.number))
        attached = self._ram("ListPoliciesForRole", {"RoleName": role})["Policies"]["Policy"]
        if role not in {policy["PolicyName"] for policy in attached}:
            self._ram("AttachPolicyToRole", {"PolicyType": "Custom", "PolicyName": role, "RoleName": role})
        return str(found["Role"]["Arn"])

    def _ensure_policy(self, name: str, rights: str) -> None:
        """The policy with these rights: a new one, or a new version of the one there is if that has others."""
        found = self._unless_missing("GetPolicy", {"PolicyName": name, "PolicyType": "Custom"})
        wanted = {"PolicyName": name, "PolicyDocument": rights}
        if found is None:
            self._ram("CreatePolicy", wanted)
        elif json.loads(found["DefaultPolicyVersion"]["PolicyDocument"]) != json.loads(rights):
            self._say(f"changing the rights of {name}")
            self._ram("CreatePolicyVersion", {**wanted, "SetAsDefault": "true", "RotateStrategy": _ROTATE})

    def _ensure_image(self, shape: Shape, package: Package) -> str:
        image = f"{shape.repository}:{package.digest}"
        if not self._docker.runs():
            raise PlatformRefused(
                f"the image {image} has to be built, and {self._docker.program} does not run here; start it, and log "
                f"in with `docker login {shape.repository.partition('/')[0]}`"
            )
        if self._docker.has_pushed(image):
            self._say(f"the image {package.digest} is there")
        else:
            self._say(f"building the image {package.digest}")
            most_bytes = template.MOST_GPU_IMAGE_BYTES if shape.has_gpus else MOST_IMAGE_BYTES
            size = self._docker.build(package, image, most_bytes=most_bytes)
            self._say(f"the image has {size / 1e9:.1f} GB unpacked, {'with' if package.has_cuda else 'without'} CUDA")
            self._docker.push(image)
        return image

    def _ensure_functions(self, shape: Shape, image: str, role: str) -> list[str]:
        """Return the names of the functions, in order of their sizes, followed by the watchdog."""
        bucket = bucket_name(shape.name, self._account.number, self._account.region)
        logs = template.log_properties(bucket)
        names: list[str] = []
        secret = self._secret(shape.name)
        for size in shape.sizes:
            wanted = template.function_properties(shape, size, image=image, role=role, logs=logs, secret=secret)
            names.append(self._ensure_function(wanted, template.async_properties()))
        if shape.watchdog:
            wanted = template.watchdog_properties(shape, image=image, role=role, logs=logs, secret=secret)
            names.append(self._ensure_function(wanted, template.watchdog_events()))
            storage = storage_at(bucket, self._account.region, self._oss_of_functions)
            platform = platform_url(shape.name, self._account.region, endpoint=self._account.endpoint)
            self._ensure_timer(names[-1], template.timer_properties(storage, platform))
        return names

    def _secret(self, name: str) -> str:
        """Return the deployment's secret: the one that its functions have, or a new one."""
        for function in self._account.deployed(name):
            if found := (function.environment_variables or {}).get(SECRET):
                return str(found)
        return new_secret()

    def _ensure_function(self, wanted: Mapping[str, Any], events: Mapping[str, Any]) -> str:
        name: str = wanted["functionName"]
        with explained(f"making {name}"):
            found = self._found(lambda: self._client.get_function(name, models.GetFunctionRequest()))
            if found is None:
                gpu = f", {wanted['gpuConfig']['gpuType']}" if "gpuConfig" in wanted else ""
                self._say(f"making {name}: {wanted['cpu']:g} vCPU, {wanted['memorySize']} MB{gpu}")
                body = models.CreateFunctionInput().from_map(wanted)
                self._client.create_function(models.CreateFunctionRequest(body=body))
            elif found.body.state in _LEFT or not _holds(found.body.to_map(), wanted):
                self._say(f"changing {name}")
                change = {key: value for key, value in wanted.items() if key != "functionName"}
                body = models.UpdateFunctionInput().from_map(change)
                self._client.update_function(name, models.UpdateFunctionRequest(body=body))
            config = self._found(
                lambda: self._client.get_async_invoke_config(name, models.GetAsyncInvokeConfigRequest())
            )
            if config is None or not _holds(config.body.to_map(), events):
                body = models.PutAsyncInvokeConfigInput().from_map(events)
                self._client.put_async_invoke_config(name, models.PutAsyncInvokeConfigRequest(body=body))
        return name

    def _ensure_timer(self, function: str, timer: Mapping[str, Any]) -> None:
        wanted = {**timer, "triggerConfig": json.dumps(timer["triggerConfig"])}
        with explained(f"making the timer of {function}"):
            found = self._found(lambda: self._client.get_trigger(function, template.TIMER))
            if found is None:
                body = models.CreateTriggerInput().from_map(wanted)
                self._client.create_trigger(function, models.CreateTriggerRequest(body=body))
            elif json.loads(found.body.trigger_config) != timer["triggerConfig"]:
                body = models.UpdateTriggerInput(trigger_config=wanted["triggerConfig"])
                self._client.update_trigger(function, template.TIMER, models.UpdateTriggerRequest(body=body))

    def _functions(self, name: str) -> list[str]:
        return [function.function_name for function in self._account.deployed(name)]

    def _delete_function(self, name: str) -> None:
        self._say(f"removing {name}")
        with explained(f"removing {name}"):
            if name.endswith(WATCHDOG):
                self._found(lambda: self._client.delete_trigger(name, template.TIMER))
            self._found(lambda: self._client.delete_function(name))

    def _ram(self, action: str, query: Mapping[str, str]) -> Mapping[str, Any]:
        with explained(action):
            return self._account.call("ram", action, _RAM, query)

    def _unless_missing(self, action: str, query: Mapping[str, str]) -> Mapping[str, Any] | None:
        with explained(action):
            try:
                return self._account.call("ram", action, _RAM, query)
            except DaraException as error:
                if code_of(error).startswith(_MISSING):
                    return None
                raise

    def _found(self, ask: Callable[[], Any]) -> Any:
        """Return an answer; None where the thing does not exist."""
        try:
            return ask()
        except DaraException as error:
            if code_of(error).startswith(_MISSING):
                return None
            raise


def _holds(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Return True if `found` has every value of `wanted`; it may have more."""
    return all(
        _holds(found.get(key) or {}, value) if isinstance(value, dict) else found.get(key) == value
        for key, value in wanted.items()
    )
