"""The keys of what validations leave in storage, and their reports: one for each, written once.

RUN/gNNNN/validations/STEP                  the report, which is written once and never changes
RUN/gNNNN/scores/STEP/WORKER/BATCH          what a replica of the last stage has measured in a batch
RUN/gNNNN/messages/WORKER.eval/STEP.BATCH/… messages between stages, until the batch is measured
RUN/gNNNN/best/sN/…                         checkpoints of the best model, without the optimiser's state
"""

import contextlib

from funcpipe.core import ValidationReport
from funcpipe.errors import KeyExists
from funcpipe.platforms.base import Storage
from funcpipe.runstate.documents import (
    find_document,
    find_readable_document,
    get_document,
    get_listed_document,
    put_document,
)
from funcpipe.runstate.keys import Keys, OfGeneration


class ValidationKeys(Keys):
    """The keys of what a generation's validations leave."""

    __slots__ = ()

    @classmethod
    def of(cls, document: OfGeneration) -> "ValidationKeys":
        """Return the keys of the generation that `document` belongs to, or that it names."""
        return cls(document.run, document.generation, document.nonce)

    def report(self, step: int) -> str:
        """Return the key of the report of the validation after `step` steps."""
        return self._key("validations", f"{step:08d}")

    @property
    def reports(self) -> str:
        """The prefix of all reports."""
        return self._folder("validations")

    def part(self, step: int, worker: str, batch: int) -> str:
        """Return the key of `worker`'s measurements in a batch of the validation after `step` steps."""
        return self._key("scores", f"{step:08d}", worker, f"{batch:08d}")

    def parts(self, step: int, worker: str) -> str:
        """Return the prefix of all parts of `worker` in a validation."""
        return self._folder("scores", f"{step:08d}", worker)

    @property
    def all_parts(self) -> str:
        """The prefix of the parts of all validations."""
        return self._folder("scores")

    def parts_of(self, step: int) -> str:
        """Return the prefix of all parts of a validation."""
        return self._folder("scores", f"{step:08d}")

    def batch_message(self, worker: str, step: int, batch: int, task: str) -> str:
        """The object that `task` of `worker` writes in a batch of the validation after `step` steps."""
        return self._key("messages", f"{worker}.eval", f"{step:08d}.{batch:08d}", task)

    def batch_messages(self, worker: str) -> str:
        """Return the prefix of all messages of `worker` in validations."""
        return self._folder("messages", f"{worker}.eval")

    def output(self, replica: int, batch: int) -> str:
        """Return the key of the model's outputs for the samples of `replica` in a batch."""
        return self._key("outputs", f"{batch:08d}.r{replica}")

    @property
    def best(self) -> "BestKeys":
        """The keys of the checkpoints of the best model."""
        return BestKeys(self.run, self.generation, self.nonce)


class BestKeys(Keys):
    """The keys of a generation, with the best model in place of checkpoints: no worker restarts from it."""

    __slots__ = ()

    def checkpoint(self, stage: int, name: str) -> str:
        """Return the key of a file of a checkpoint of the best model's `stage`."""
        return self._key("best", f"s{stage}", name)

    @property
    def checkpoints(self) -> str:
        """The prefix of all files of the best models."""
        return self._folder("best")


def find_report(storage: Storage, keys: ValidationKeys, step: int) -> ValidationReport | None:
    """Return the report of the validation after `step` steps, if there is one."""
    return find_document(storage, ValidationReport, keys.report(step))


def put_report(storage: Storage, keys: ValidationKeys, report: ValidationReport) -> ValidationReport:
    """Write `report`, unless there is one of its step; the one that counts."""
    with contextlib.suppress(KeyExists):
        put_document(storage, keys.report(report.step), report, if_absent=True)
    return get_document(storage, ValidationReport, keys.report(report.step))


def load_reports(storage: Storage, keys: ValidationKeys) -> tuple[ValidationReport, ...]:
    """Return all reports of the generation, in the order of their steps."""
    found = sorted(storage.list(keys.reports))
    return tuple(get_listed_document(storage, ValidationReport, key) for key in found)


def newest_report(storage: Storage, keys: ValidationKeys) -> ValidationReport | None:
    """Return the report of the newest validation of the generation, if there is one that can be read."""
    newest = max(storage.list(keys.reports), default=None)
    return None if newest is None else find_readable_document(storage, ValidationReport, newest)
