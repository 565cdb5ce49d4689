"""The states of functions, which moto does not know: which are invoked, and what becomes of those that nobody invoked.

After docs.aws.amazon.com/lambda/latest/dg/functions-states.html and images-create.html, 2026-11: a function of an image
that nobody has invoked for weeks is Inactive. The invocation that wakes it is rejected, and it is Pending until its
image is there again; if that cannot be, it is Inactive again. What is invoked meanwhile is rejected too
(github.com/boto/boto3/issues/3788 has the answer's words). A new image makes its functions Active.
"""

import json
from dataclasses import dataclass, field
from typing import Any

REJECTED = (
    "CodeArtifactUserPendingException",
    "Lambda is initializing your function. It will be ready to invoke shortly.",
)
_WHY = {"Inactive": "The function is idle.", "Pending": "The function is being restored."}


@dataclass(kw_only=True)
class FunctionStates:
    """The functions that are not Active. One that is Pending ceases to be after so many requests about it."""

    requests: int = 2
    restorable: bool = True
    states: dict[str, str] = field(default_factory=dict)
    codes: dict[str, str] = field(default_factory=dict)
    _left: dict[str, int] = field(default_factory=dict)

    def fall_asleep(self, name: str) -> None:
        self.states[name], self.codes[name] = "Inactive", "Idle"

    def admits(self, name: str) -> bool:
        """Whether an invocation is accepted; one that is not wakes an Inactive function."""
        if self.states.get(name) == "Inactive":
            self.states[name], self.codes[name], self._left[name] = "Pending", "Restoring", self.requests
            return False
        self._count(name)
        return name not in self.states

    def shown(self, name: str, answer: bytes) -> bytes:
        """What GetFunctionConfiguration says of a function, from what moto says."""
        if name not in self.states:
            return answer
        state, code = self.states[name], self.codes[name]
        self._count(name)
        found: dict[str, Any] = json.loads(answer)
        reason = _WHY[state] if code in {"Idle", "Restoring"} else "The image is gone."
        return json.dumps(found | {"State": state, "StateReason": reason, "StateReasonCode": code}).encode()

    def _count(self, name: str) -> None:
        """Note a request about a function."""
        if self.states.get(name) != "Pending":
            return
        self._left[name] -= 1
        if self._left[name] > 0:
            return
        if self.restorable:
            del self.states[name]
        else:
            self.states[name], self.codes[name] = "Inactive", "ImageDeleted"
