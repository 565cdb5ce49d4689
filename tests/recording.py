"""A platform for tests of what functions start."""

from dataclasses import dataclass, field

from funcpipe.core import Invocation, Plan, PlatformSpec
from funcpipe.core.logs import RawLine
from funcpipe.errors import PlatformError
from funcpipe.platforms.base import Handle, PlainKeys, Platform, State, Status
from funcpipe.platforms.catalog import load_spec


@dataclass
class Recording(PlainKeys):
    """A platform that notes what it is to start, or cannot."""

    spec: PlatformSpec = field(default_factory=lambda: load_spec("local"))
    url: str = "recording://here"
    fails: bool = False
    invoked: list[Invocation] = field(default_factory=list)

    def check(self, plan: Plan, *, run_s: float | None = None) -> None:
        """It takes any plan."""

    def invoke(self, worker: Invocation) -> Handle:
        if self.fails:
            raise PlatformError("no room")
        self.invoked.append(worker)
        return Handle(worker=worker.worker, name=f"function {len(self.invoked)}")

    def status(self, handle: Handle) -> Status:
        return Status(state=State.RUNNING)

    def stop(self, handle: Handle) -> None:
        raise NotImplementedError

    def logs(self, run: str) -> tuple[RawLine, ...]:
        return ()

    def detach(self) -> None:
        raise NotImplementedError

    def open(self, url: str) -> Platform:
        assert url == self.url
        return self
