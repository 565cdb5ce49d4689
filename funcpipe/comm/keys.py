"""Where everything of a run lies in the object storage.

Nothing is written twice and nothing is shared by two runs: a key says run, attempt, step and task, so that all of a run
can be deleted by its prefix.
"""

import re
from dataclasses import dataclass

from funcpipe.errors import InvalidValue

_RUN = re.compile(r"[a-z0-9][a-z0-9-]{0,62}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one attempt of one run."""

    run: str
    attempt: int = 0

    def __post_init__(self) -> None:
        if not _RUN.fullmatch(self.run):
            raise InvalidValue("run", self.run, "must be at most 63 small letters, digits and dashes")

    @property
    def prefix(self) -> str:
        """What every key of the run begins with."""
        return f"{self.run}/"

    def bundle(self, stage: int) -> str:
        """The code of a stage."""
        return f"{self.run}/stage/s{stage}.bundle"

    def parameters(self, stage: int) -> str:
        """The tensors that a stage starts from."""
        return f"{self.run}/stage/s{stage}.tensors"

    def message(self, step: int, task: str) -> str:
        """The object that the task `task`, a put, writes in `step`."""
        return f"{self._attempt}/{step:08d}/{task}"

    def step_report(self, step: int, worker: str) -> str:
        """What `worker` says after `step`."""
        return f"{self._attempt}/steps/{step:08d}.{worker}"

    def worker_report(self, worker: str) -> str:
        """What `worker` says when it ends."""
        return f"{self._attempt}/reports/{worker}"

    def trace(self, worker: str) -> str:
        """The events of `worker`."""
        return f"{self._attempt}/traces/{worker}"

    def result(self, stage: int) -> str:
        """The tensors of a stage after training."""
        return f"{self._attempt}/results/s{stage}.tensors"

    @property
    def _attempt(self) -> str:
        return f"{self.run}/a{self.attempt}"
