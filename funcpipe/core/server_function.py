"""The payload of a function that computes gradients for a parameter server."""

from dataclasses import dataclass, field
from typing import ClassVar

from funcpipe.core import checks


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFunctionSpec:
    """The payload of a function that is, as its `attempt`, the `worker` of a parameter server.

    `storage` is the URL of the run's objects, among them the whole model's code, which is loaded only if its SHA-256 is
    `bundle_sha256`. The function leaves before it is `lifetime_s` old, and fails when no work has come for twice
    `message_deadline_s`, which is how long its client waits for an answer. `generation` and `nonce` are parts of the
    run's keys, `run_key` is the text of its RunKey. `log_level` is what `core.logs.read_levels` reads.
    """

    FORMAT: ClassVar[str] = "funcpipe.server-function/1"

    run: str
    worker: str
    attempt: int
    size: str
    memory_mb: int
    storage: str
    bundle_sha256: str
    seed: int
    message_deadline_s: float
    generation: int = 0
    nonce: str = ""
    lifetime_s: float | None = None
    log_level: str = "INFO"
    run_key: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        checks.filled("run", self.run)
        checks.filled("worker", self.worker)
        checks.at_least("attempt", self.attempt, 0)
        checks.at_least("memory_mb", self.memory_mb, 1)
        checks.positive("message_deadline_s", self.message_deadline_s)
        if self.lifetime_s is not None:
            checks.positive("lifetime_s", self.lifetime_s)
