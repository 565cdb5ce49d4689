"""The validations of a run as its client sees them: waited for when they are due, and collected at the end."""

import logging

import torch
from torch import Tensor

from funcpipe.client.follow.polling import StepPolls
from funcpipe.client.follow.supervisor import Supervisor
from funcpipe.client.prepare.job import Job
from funcpipe.client.prepare.prepared_run import PreparedRun
from funcpipe.core import ValidationReport
from funcpipe.core.validation import is_due
from funcpipe.errors import DeadlineExceeded
from funcpipe.platforms.base import Storage
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.owner import Owner
from funcpipe.runstate.validation_reports import ValidationKeys, find_report
from funcpipe.runstate.validations import get_part

_log = logging.getLogger(__name__)


class Validations:
    """The reports of one run's validations, waited for when due."""

    def __init__(
        self, prepared: PreparedRun, keys: Keys, supervisor: Supervisor, owner: Owner, polls: StepPolls
    ) -> None:
        self._prepared = prepared
        self._keys = ValidationKeys.of(keys)
        self._supervisor = supervisor
        self._owner = owner
        self._polls = polls
        record = prepared.running
        known = prepared.validations if record is None else record.validations
        self._known = max((report.step for report in known), default=-1)
        self._began_step = prepared.began_step if record is None else record.began_step

    def after(self, step: int) -> ValidationReport | None:
        """The report of the validation after `step` steps, once there is one; None if none is due, or it is known.

        Functions are supervised meanwhile. Raises DeadlineExceeded if no batch is measured for long.
        """
        evaluation = self._prepared.job.evaluation
        if evaluation is None or step <= self._known:
            return None
        if not is_due(step, every=evaluation.every, began_step=self._began_step):
            return None
        storage, job, faults = self._prepared.storage, self._prepared.job, self._prepared.faults
        deadline_s = job.message_deadline_s + faults.cold_start_s + faults.start_s
        until_s, seen = self._polls.now_s() + deadline_s, -1

        def supervise() -> None:
            nonlocal until_s, seen
            self._owner.check()
            self._supervisor.poll()
            if self._polls.now_s() <= until_s:
                return
            parts = len(storage.list(self._keys.parts_of(step)))
            if parts == seen:
                raise DeadlineExceeded(
                    f"run {self._keys.run}: the validation after step {step} measured no batch in {deadline_s:g} s"
                )
            until_s, seen = self._polls.now_s() + deadline_s, parts

        report, _ = self._polls.until(lambda: find_report(storage, self._keys, step), supervise)
        return report


def load_outputs(storage: Storage, keys: Keys, job: Job) -> dict[str, Tensor]:
    """The outputs of a model that predicts for all samples, in their order; empty for any other."""
    evaluation = job.evaluation
    if evaluation is None or not evaluation.keep_outputs:
        return {}
    own, rows = ValidationKeys.of(keys), list[dict[str, Tensor]]()
    for batch in evaluation.batches(job.plan):
        found: dict[str, Tensor] = {}
        for replica in range(min(job.plan.replicas, len(batch.micro_batches))):
            found |= get_part(storage, own.output(replica, batch.number))
        for number in range(len(batch.micro_batches)):
            prefix = f"{number}/"
            rows.append({name.removeprefix(prefix): t for name, t in found.items() if name.startswith(prefix)})
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
