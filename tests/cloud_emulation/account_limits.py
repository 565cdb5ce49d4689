"""What an account may have of functions and builds: all that it needs, or as little as a new one.

Service Quotas may show builds that the account cannot start: github.com/awslabs/landing-zone-accelerator-on-aws/
issues/361 names the quota, and many more the words of the error.
"""

import json
from dataclasses import dataclass

from tests.cloud_emulation.aws_errors import Answer, json_error


@dataclass(kw_only=True)
class AccountLimits:
    """Functions and builds that run at once; `shown_builds` is what Service Quotas says, None that it knows nothing."""

    concurrency: int = 1000
    builds: int = 1
    shown_builds: int | None = 1

    def answer(self, call: str, body: bytes) -> Answer | None:
        """What the account answers to a call that is about its limits, or beyond them; None for all others."""
        if call == "GET /2016-08-19/account-settings":
            limit = {"ConcurrentExecutions": self.concurrency, "UnreservedConcurrentExecutions": self.concurrency}
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
