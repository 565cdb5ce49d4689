"""Provisioned concurrency, events of aliases and scheduled scaling, none of which moto has for functions.

After docs.aws.amazon.com/lambda/latest/dg/provisioned-concurrency.html and configuration-aliases.html, and
docs.aws.amazon.com/autoscaling/application/APIReference (PutScheduledAction, DeregisterScalableTarget), 2026-11: only
one alias of a version may have provisioned concurrency, none that names $LATEST; 100 of the account's concurrency stay
free of it; a target that is deregistered loses its actions.
"""

import calendar
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.cloud_emulation.aws_errors import Answer, json_error

LEAST_FREE = 100
_PATH = re.compile(r"/20[\d-]+/functions/([\w-]+)/(provisioned-concurrency|event-invoke-config)")
_DEFAULTS = {"MaximumRetryAttempts": 2, "MaximumEventAgeInSeconds": 21600}
_SCALING = ("RegisterScalableTarget", "PutScheduledAction", "DeregisterScalableTarget")
Key = tuple[str, str]


@dataclass(kw_only=True)
class Provisioned:
    """What is kept ready in an account: `configs` by function and alias, and how many of each are in use.

    A config is ready after so many `requests` about it, unless it `fails`, for that reason. `spilled` counts the events
    of aliases that found none ready.
    """

    requests: int = 2
    fails: str | None = None
    spilled: int = 0
    configs: dict[Key, int] = field(default_factory=dict)
    in_use: dict[Key, int] = field(default_factory=dict)
    events: dict[Key, dict[str, Any]] = field(default_factory=dict)
    targets: dict[str, dict[str, int]] = field(default_factory=dict)
    actions: dict[str, tuple[float, int]] = field(default_factory=dict)
    _left: dict[Key, int] = field(default_factory=dict)

    def event_settings(self, function: str, alias: str) -> Mapping[str, Any]:
        """How events of an alias are treated: those of the function itself do not count."""
        return self.events.get((function, alias), _DEFAULTS)

    def enter(self, function: str, alias: str) -> bool:
        """Whether an event is served by a function that is kept ready: else by one on demand, of the same version."""
        key = function, alias
        is_ready = self.in_use.get(key, 0) < self.configs.get(key, 0) and not self._left.get(key)
        self.in_use[key] = self.in_use.get(key, 0) + is_ready
        self.spilled += not is_ready
        return is_ready

    def leave(self, function: str, alias: str) -> None:
        self.in_use[function, alias] -= 1

    def pass_to(self, moment_s: float) -> None:
        """Let time pass until then: what was scheduled happens."""
        for resource, (at_s, most) in list(self.actions.items()):
            if at_s <= moment_s:
                _, function, alias = resource.split(":")
                del self.actions[resource]
                if most < self.configs.get((function, alias), 0):
                    self._set(function, alias, most)

    def answer(self, method: str, url: str, call: str, body: bytes, *, account: Any, unreserved: int) -> Answer | None:
        """What the account answers, whose `account` is Lambda's client; None for what is not about this."""
        if call in _SCALING:
            return self._scale(call, json.loads(body), account)
        query = {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}
        match = _PATH.fullmatch(urlsplit(url).path)
        if match is None:
            return None
        if "List" in query:
            found = [
                {"RequestedProvisionedConcurrentExecutions": n}
                for (name, _), n in self.configs.items()
                if name == match[1]
            ]
            return _json(200, {"ProvisionedConcurrencyConfigs": found})
        if "Qualifier" not in query:
            return None
        function, alias = match[1], query["Qualifier"]
        version = _version(account, function, alias)
        if version is None:
            return json_error(404, "ResourceNotFoundException", f"Cannot find alias arn: {function}:{alias}")
        if match[2] == "event-invoke-config":
            assert method == "PUT"
            self.events[function, alias] = json.loads(body)
            return _json(200, json.loads(body))
        if method == "PUT":
            return self._put(function, alias, version, json.loads(body), account, unreserved)
        if method == "DELETE":
            self._set(function, alias, 0)
            return 204, b"", {}
        return self._get(function, alias)

    def _put(
        self, function: str, alias: str, version: str, body: Mapping[str, Any], account: Any, unreserved: int
    ) -> Answer:
        count = body["ProvisionedConcurrentExecutions"]
        others = [other for name, other in self.configs if name == function and other != alias]
        if version == "$LATEST":
            text = "Provisioned Concurrency Configs cannot be applied to unpublished function versions."
            return json_error(400, "InvalidParameterValueException", text)
        if any(_version(account, function, other) == version for other in others):
            text = "Alias can't be used for Provisioned Concurrency configuration on an already Provisioned version"
            return json_error(400, "InvalidParameterValueException", text)
        kept = sum(n for key, n in self.configs.items() if key != (function, alias))
        if unreserved - kept - count < LEAST_FREE:
            text = (
                "Specified ConcurrentExecutions for function decreases account's UnreservedConcurrentExecution below "
                f"its minimum value of [{LEAST_FREE}]."
            )
            return json_error(400, "InvalidParameterValueException", text)
        self._set(function, alias, count)
        self._left[function, alias] = self.requests
        return self._get(function, alias, status=202)

    def _get(self, function: str, alias: str, *, status: int = 200) -> Answer:
        key = function, alias
        if key not in self.configs:
            return json_error(
                404, "ProvisionedConcurrencyConfigNotFoundException", "No Provisioned Concurrency Config found"
            )
        is_ready = not self._left.get(key)
        self._left[key] = max(self._left.get(key, 0) - 1, 0)
        if self.fails is not None:
            return _json(status, {"Status": "FAILED", "StatusReason": self.fails})
        return _json(status, {"Status": "READY" if is_ready else "IN_PROGRESS"})

    def _set(self, function: str, alias: str, count: int) -> None:
        self.configs.pop((function, alias), None)
        if count:
            self.configs[function, alias] = count

    def _scale(self, call: str, body: Mapping[str, Any], account: Any) -> Answer:
        assert body["ServiceNamespace"] == "lambda"
        assert body["ScalableDimension"] == "lambda:function:ProvisionedConcurrency"
        resource = body["ResourceId"]
        kind, function, alias = resource.split(":")
        if call == "RegisterScalableTarget":
            if kind != "function" or _version(account, function, alias) is None:
                return json_error(400, "ValidationException", f"The resource does not exist: {resource}")
            self.targets[resource] = {"MinCapacity": body["MinCapacity"], "MaxCapacity": body["MaxCapacity"]}
        elif resource not in self.targets:
            return json_error(400, "ObjectNotFoundException", f"No scalable target found for {resource}")
        elif call == "DeregisterScalableTarget":
            del self.targets[resource]
            self.actions.pop(resource, None)
        else:
            at = re.fullmatch(r"at\((\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\)", body["Schedule"])
            moment_s = calendar.timegm(time.strptime(at[1], "%Y-%m-%dT%H:%M:%S")) if at else 0
            if moment_s <= time.time():
                return json_error(400, "ValidationException", f"Invalid schedule expression: {body['Schedule']}")
            self.actions[resource] = moment_s, body["ScalableTargetAction"]["MaxCapacity"]
        return _json(200, {})


def _version(account: Any, function: str, alias: str) -> str | None:
    """The version that an alias names; None without the alias."""
    try:
        return str(account.get_alias(FunctionName=function, Name=alias)["FunctionVersion"])
    except account.exceptions.ResourceNotFoundException:
        return None


def _json(status: int, value: Mapping[str, Any]) -> Answer:
    return status, json.dumps(value).encode(), {"Content-Type": "application/json"}
