"""Provisioned concurrency of Lambda: functions that are kept ready while a run lasts, and released after it.

It belongs to a version of a function, and is asked for and invoked by an alias. Application Auto Scaling releases it at
a moment that is set before it is asked for, so that nothing is kept longer if the client dies.
"""

import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

from funcpipe.errors import DeadlineExceeded, PlatformRefused
from funcpipe.platforms.aws.account import Account, explained
from funcpipe.platforms.shared.cloud import Polling

_log = logging.getLogger(__name__)

ALIAS = "provisioned"
"""The alias by which functions that are kept ready are invoked."""

READY_WITHIN_S = 900.0
"""Functions that are not ready by then are released again."""

_DIMENSION = {"ServiceNamespace": "lambda", "ScalableDimension": "lambda:function:ProvisionedConcurrency"}
_EVENTS = ("MaximumRetryAttempts", "MaximumEventAgeInSeconds", "DestinationConfig")


class ProvisionedConcurrency:
    """The functions of an account that are kept ready for one run at a time, which their alias names as the owner."""

    def __init__(self, account: Account, polling: Polling) -> None:
        self._lambda: Any = account.client("lambda")
        self._scaling: Any = account.client("application-autoscaling")
        self._polling = polling

    def provision(self, counts: Mapping[str, int], owner: str, *, released_after_s: float) -> None:
        """Return when so many of each function are ready. If that fails, none is kept ready.

        Raises PlatformRefused where some are kept ready for others, or AWS has none, and DeadlineExceeded.
        """
        for name in counts:
            self._check_free(name, owner)
        until_s = self._polling.clock() + released_after_s
        try:
            for name, count in counts.items():
                self._point_alias(name, owner)
                self._plan_release(name, count, until_s)
                with explained(f"keeping {count} of {name} ready"):
                    self._lambda.put_provisioned_concurrency_config(
                        FunctionName=name, Qualifier=ALIAS, ProvisionedConcurrentExecutions=count
                    )
            self._await_ready(list(counts))
        except BaseException:
            self.release(counts, owner)
            raise

    def release(self, names: Iterable[str], owner: str) -> None:
        """Keep no function ready any more that was for `owner`; what others keep ready stays."""
        for name in names:
            with explained(f"releasing {name}"):
                if self._owner(name) == owner:
                    self._release(name)

    def _check_free(self, name: str, owner: str) -> None:
        with explained(f"looking whether {name} is kept ready"):
            found = self._lambda.list_provisioned_concurrency_configs(FunctionName=name)
            is_free = not found["ProvisionedConcurrencyConfigs"] or self._owner(name) == owner
        if not is_free:
            raise PlatformRefused(f"{name} has provisioned concurrency already, for another run or by your own setting")

    def _point_alias(self, name: str, owner: str) -> None:
        """Have the alias name the newest code, and its events be treated as those of the function are."""
        with explained(f"publishing {name}"):
            version = self._lambda.publish_version(FunctionName=name)["Version"]
            every = {"Delay": self._polling.every_s, "MaxAttempts": int(READY_WITHIN_S / self._polling.every_s)}
            waiter = self._lambda.get_waiter("published_version_active")
            waiter.wait(FunctionName=name, Qualifier=version, WaiterConfig=every)
            known = self._owner(name) is not None
            change = self._lambda.update_alias if known else self._lambda.create_alias
            change(FunctionName=name, Name=ALIAS, FunctionVersion=version, Description=owner)
            events = self._lambda.get_function_event_invoke_config(FunctionName=name)
            settings = {key: events[key] for key in _EVENTS if key in events}
            self._lambda.put_function_event_invoke_config(FunctionName=name, Qualifier=ALIAS, **settings)

    def _plan_release(self, name: str, count: int, until_s: float) -> None:
        with explained(f"setting when {name} is released"):
            self._scaling.register_scalable_target(
                **_DIMENSION, ResourceId=_resource(name), MinCapacity=0, MaxCapacity=count
            )
            self._scaling.put_scheduled_action(
                **_DIMENSION,
                ResourceId=_resource(name),
                ScheduledActionName="release",
                Schedule=time.strftime("at(%Y-%m-%dT%H:%M:%S)", time.gmtime(until_s)),
                ScalableTargetAction={"MinCapacity": 0, "MaxCapacity": 0},
            )

    def _await_ready(self, names: list[str]) -> None:
        until_s = self._polling.clock() + READY_WITHIN_S
        while names:
            found = self._config(names[0])
            if found["Status"] == "FAILED":
                why = found.get("StatusReason", "no reason given")
                raise PlatformRefused(f"{names[0]} cannot be kept ready: {why}")
            if found["Status"] == "READY":
                names = names[1:]
            elif self._polling.clock() > until_s:
                raise DeadlineExceeded(f"{names[0]} is not ready after {READY_WITHIN_S:g} s")
            else:
                self._polling.sleep(self._polling.every_s)

    def _config(self, name: str) -> Any:
        with explained(f"waiting until {name} is ready"):
            return self._lambda.get_provisioned_concurrency_config(FunctionName=name, Qualifier=ALIAS)

    def _owner(self, name: str) -> str | None:
        """The owner whom the alias names; None without an alias."""
        try:
            return str(self._lambda.get_alias(FunctionName=name, Name=ALIAS).get("Description", ""))
        except self._lambda.exceptions.ResourceNotFoundException:
            return None

    def _release(self, name: str) -> None:
        try:
            self._lambda.delete_provisioned_concurrency_config(FunctionName=name, Qualifier=ALIAS)
        except self._lambda.exceptions.ResourceNotFoundException:
            _log.debug("%s was not kept ready", name)
        try:
            self._scaling.deregister_scalable_target(**_DIMENSION, ResourceId=_resource(name))
        except self._scaling.exceptions.ObjectNotFoundException:
            _log.debug("no release of %s was planned", name)


def _resource(name: str) -> str:
    return f"function:{name}:{ALIAS}"
