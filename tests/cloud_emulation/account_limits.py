"""What an account may have of functions and builds: all that it needs, or as little as a new one.

Service Quotas may show builds that the account cannot start: github.com/awslabs/landing-zone-accelerator-on-aws/
issues/361 names the quota, and many more the words of the error.
"""

import json
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from tests.cloud_emulation.aws_errors import Answer, json_error


@dataclass(kw_only=True)
class AccountLimits:
    """Functions and builds that run at once; `shown_builds` is what Service Quotas says, None that it knows nothing.

    A function runs no more often than is `reserved` for it; the others share what is left. `throttled` counts the tries
    of events that found no room.
    """

    concurrency: int = 1000
    reserved: dict[str, int] = field(default_factory=dict)
    builds: int = 1
    shown_builds: int | None = 1
    throttled: int = 0
    _running: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def unreserved(self) -> int:
        return self.concurrency - sum(self.reserved.values())

    def wait_for_room(self, name: str, oldest_s: float) -> bool:
        """Wait in Lambda's queue of events until one more function may run; False if the event is too old by then.

        It is tried again after a second, two, four, … (docs.aws.amazon.com/lambda/latest/dg/
        invocation-async-error-handling.html, 2026-11).
        """
        waited_s, pause_s = 0.0, 1.0
        while not self._enter(name):
            if waited_s + pause_s > oldest_s:
                return False
            self.throttled += 1
            time.sleep(pause_s)
            waited_s, pause_s = waited_s + pause_s, min(2 * pause_s, 300.0)
        return True

    def leave(self, name: str) -> None:
        """Note that a function has ended."""
        with self._lock:
            self._running[name] -= 1

    def _enter(self, name: str) -> bool:
        with self._lock:
            if name in self.reserved:
                is_full = self._running[name] >= self.reserved[name]
            else:
                others = sum(count for other, count in self._running.items() if other not in self.reserved)
                is_full = others >= self.unreserved
            self._running[name] += not is_full
            return not is_full

    def answer(self, call: str, body: bytes) -> Answer | None:
        """What the account answers to a call that is about its limits, or beyond them; None for all others."""
        if call == "GET /2016-08-19/account-settings":
            limit = {"ConcurrentExecutions": self.concurrency, "UnreservedConcurrentExecutions": self.unreserved}
            return 200, json.dumps({"AccountLimit": limit}).encode(), {}
        if call == "GetServiceQuota":
            asked = json.loads(body)
            assert (asked["ServiceCode"], asked["QuotaCode"]) == ("codebuild", "L-2DC20C30")
            if self.shown_builds is None:
                return json_error(400, "NoSuchResourceException", "the quota is not there")
            return 200, json.dumps({"Quota": {"Value": float(self.shown_builds)}}).encode(), {}
        if call == "StartBuild" and not self.builds:
            text = "Cannot have more than 0 builds in queue for the account"
            return json_error(400, "AccountLimitExceededException", text)
        return None
