"""Polls of a run from outside: they read what `status` reads, with few requests, and write nothing."""

import functools
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from funcpipe.client.control.status import RunStatus, read_status
from funcpipe.client.control.verdict import Verdict
from funcpipe.core import (
    MB,
    Heartbeat,
    Outcome,
    Plan,
    RequestCounts,
    RunRecord,
    StepReport,
    StepSummary,
    WorkerReport,
    worker_name,
)
from funcpipe.errors import RunUnknown
from funcpipe.platforms.base import OpenPlatform, Storage
from funcpipe.platforms.catalog import open_platform as open_by_url
from funcpipe.runstate.documents import find_readable_document, readable_documents
from funcpipe.runstate.functions import list_functions
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.liveness import HeartbeatReader, WorkerState
from funcpipe.runstate.reader import RunReader
from funcpipe.runstate.reports import LOSSES_READ, JoinedStep
from funcpipe.runstate.signing import signed
from funcpipe.runstate.snapshot import Snapshot

_NEARLY_FULL = 0.95
_MUCH_SLOWER = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Succession:
    """A function that was started as another `attempt` of a worker, and `reason`: why."""

    worker: str
    attempt: int
    started_at_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoss:
    """The mean loss over the samples of a step, which is counted from 0."""

    step: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run at one poll, at `looked_at_s` of this machine's clock.

    `done` steps are reported, a few more than in heartbeats. `losses` are the newest that are known, those of some
    steps may be missing; `first_loss` is the oldest. A step takes `step_s`, and the rest of the run `left_s`; the run
    will have cost `expected_usd` if the rest costs per second what it has cost so far. The plan expected `planned_s`
    for a step and `planned_usd` for all of them. `lane_shares` holds, for each worker, the share of its `beats` (those
    that this watcher has seen) in which a lane had a task, waits for messages included. `asked` are the requests to
    the storage of this poll.
    """

    FORMAT: ClassVar[str] = "funcpipe.run-view/1"

    looked_at_s: float
    platform: str
    status: RunStatus
    done: int
    losses: tuple[StepLoss, ...] = ()
    first_loss: StepLoss | None = None
    skipped: int = 0
    step_s: float | None = None
    left_s: float | None = None
    expected_usd: float | None = None
    planned_s: float | None = None
    planned_usd: float | None = None
    beats: Mapping[str, int] = field(default_factory=dict)
    lane_shares: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    successions: tuple[Succession, ...] = ()
    warnings: tuple[str, ...] = ()
    asked: RequestCounts = field(default_factory=RequestCounts)

    @property
    def has_ended(self) -> bool:
        """True if nothing of the run goes on, nor will by itself; a watchdog may restart a dead run."""
        return self.status.verdict in (Verdict.FINISHED, Verdict.STOPPED, Verdict.FAILED)


def planned(plan: Plan, steps: int) -> tuple[float | None, float | None]:
    """Seconds of one step, and dollars of so many, as the plan expected them; None where it has no estimate."""
    if plan.estimate is None:
        return None, None
    return plan.estimate.iteration_s, steps * plan.estimate.cost_usd


def _warnings_of(status: RunStatus, *, skipped: int, step_s: float | None, planned_s: float | None) -> tuple[str, ...]:
    """The problems to investigate, the worst first."""
    found = []
    if status.verdict in (Verdict.WAITING, Verdict.DEAD):
        found.append(f"{status.verdict.value}: {status.explanation}")
    if status.halt is not None and status.verdict is not Verdict.FAILED:
        found.append(f"ends early: {status.halt}")
    for worker in status.workers:
        if worker.state in (WorkerState.SILENT, WorkerState.DEAD, WorkerState.FAILED):
            found.append(f"{worker.worker} is {worker.state.value}" + (f": {worker.error}" if worker.error else ""))
        elif worker.memory_bytes > _NEARLY_FULL * worker.memory_mb * MB:
            share = worker.memory_bytes / (worker.memory_mb * MB)
            found.append(
                f"{worker.worker} has used {share:.0%} of its memory: train with --set training.on-oom=grow, or plan "
                "anew"
            )
    if skipped:
        whose = "step updated nothing, as its" if skipped == 1 else "steps updated nothing, as their"
        found.append(f"{skipped} {whose} gradients were not finite")
    if step_s is not None and planned_s and step_s > _MUCH_SLOWER * planned_s:
        found.append(f"a step takes {step_s:.3g} s, {step_s / planned_s:.1f} times what the plan expected")
    return tuple(found)


_LOSSES = 240
_RATE_POLLS = 12
_RATE_STEPS = 5
"""A rate over fewer steps than that is taken from the workers, who measure each step."""


class Watcher:
    """A watcher of one run. Each `poll` but the first takes about 12 requests, and one more for each worker, up to 16,
    that has sent a heartbeat, and for each replica, up to 8.
    """

    def __init__(
        self,
        storage: Storage,
        run: str,
        open_platform: OpenPlatform = open_by_url,
        *,
        clock: Callable[[], float] = time.time,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """With `pause`, a poll waits for heartbeats of workers that seem silent, as `status` does."""
        self._storage = Snapshot(signed(storage))
        self._run = run
        self._open_platform = functools.cache(open_platform)
        self._clock, self._pause = clock, pause
        self._reports: dict[str, dict[int, StepReport]] = {}
        self._losses: dict[int, float] = {}
        self._rates: deque[tuple[float, int]] = deque(maxlen=_RATE_POLLS)
        self._beats: dict[str, set[tuple[int, int]]] = {}
        self._lanes: dict[str, Counter[str]] = {}
        self._seen: RunView | None = None
        self._forget(Keys(run))

    def poll(self) -> RunView:
        """The run as it is now. Raises RunUnknown, which says how far it had come if it was there before."""
        before = self._storage.asked
        self._storage.renew()
        try:
            reader = RunReader.newest(self._storage, self._run)
            if reader.keys != self._keys:
                self._forget(reader.keys)
            status = read_status(
                *(reader, self._open_platform), clock=self._clock, pause=self._wait, heartbeats=self._heartbeats
            )
        except RunUnknown as error:
            if self._seen is None:
                raise
            raise self._gone() from error
        record, finished = reader.record, reader.finished
        if finished is None:
            self._learn_losses(record)
        else:
            first = record.began_step
            self._losses = dict(enumerate(finished.losses, start=first))
        skipped = self._skipped(record) if finished is None else len(finished.skipped_steps)
        beats = list(self._heartbeats.beats.values())
        self._count_lanes(beats)
        self._seen = self._view(record, status, beats, skipped=skipped, asked=_since(self._storage.asked, before))
        return self._seen

    def _view(
        self, record: RunRecord, status: RunStatus, beats: list[Heartbeat], *, skipped: int, asked: RequestCounts
    ) -> RunView:
        now_s = self._clock()
        done = max([status.step, *(step + 1 for step in self._losses)]) if self._losses else status.step
        ended = status.verdict in (Verdict.FINISHED, Verdict.STOPPED, Verdict.FAILED, Verdict.DEAD)
        self._rates.append((now_s, done))
        step_s = None if ended else self._step_s(beats)
        left_s = None if step_s is None else (record.steps - done) * step_s
        known = [StepLoss(step=step, loss=loss) for step, loss in sorted(self._losses.items())]
        planned_s, planned_usd = planned(record.plan, record.steps - record.began_step)
        return RunView(
            looked_at_s=now_s,
            platform=record.platform,
            status=status,
            done=done,
            losses=tuple(known[-_LOSSES:]),
            first_loss=known[0] if known else None,
            skipped=skipped,
            step_s=step_s,
            left_s=left_s,
            expected_usd=_expected_usd(status, left_s),
            planned_s=planned_s,
            planned_usd=planned_usd,
            beats={worker: len(seen) for worker, seen in self._beats.items()},
            lane_shares={
                worker: {lane: count / len(self._beats[worker]) for lane, count in lanes.items()}
                for worker, lanes in self._lanes.items()
            },
            successions=tuple(self._successions(beats)),
            warnings=_warnings_of(status, skipped=skipped, step_s=step_s, planned_s=planned_s),
            asked=asked,
        )

    def _forget(self, keys: Keys) -> None:
        """The run goes on as another generation: its workers count their attempts from 0 again."""
        self._keys, self._heartbeats = keys, HeartbeatReader(self._storage, keys, clock=self._clock)
        for seen in (self._reports, self._losses, self._rates, self._beats, self._lanes):
            seen.clear()

    def _wait(self, seconds: float) -> None:
        """Wait for a heartbeat, which must then be read anew."""
        self._pause(seconds)
        self._storage.renew()

    def _gone(self) -> RunUnknown:
        seen = self._seen
        assert seen is not None
        return RunUnknown(
            f"run {self._run} is not in the storage any more; it was seen last after step {seen.done} of "
            f"{seen.status.steps}. The client that trained it has collected its result, or it was deleted"
        )

    def _learn_losses(self, record: RunRecord) -> None:
        """The losses of summaries that are new, and of the newest step that replicas have reported, the first few."""
        keys, last = self._keys, len(record.plan.stages) - 1
        workers = [worker_name(last, replica) for replica in range(min(record.plan.replicas, LOSSES_READ))]
        for worker in workers:
            newest = max(self._storage.list(keys.step_summaries(worker)), default=None)
            if newest is not None:
                for summary in readable_documents(self._storage, StepSummary, [newest]):
                    self._reports.setdefault(worker, {}).update(summary.reports())
        singles = {key.removeprefix(keys.step_reports) for key in self._storage.list(keys.step_reports)}
        steps = sorted({int(name.partition(".")[0]) for name in singles}, reverse=True)
        reported = (step for step in steps if all(f"{step:08d}.{worker}" in singles for worker in workers))
        if (newest_step := next(reported, None)) is not None:
            for worker in workers:
                report = find_readable_document(self._storage, StepReport, keys.step_report(newest_step, worker))
                if report is not None:
                    self._reports.setdefault(worker, {})[newest_step] = report
        self._losses = dict(enumerate(record.losses, start=record.began_step))
        own = [self._reports.get(worker, {}) for worker in workers]
        for step in sorted(set.intersection(*(set(reports) for reports in own))):
            self._losses[step] = JoinedStep.of([reports[step] for reports in own]).loss

    def _skipped(self, record: RunRecord) -> int:
        steps = {step for reports in self._reports.values() for step, report in reports.items() if report.skipped}
        return len(steps | set(record.skipped_steps))

    def _step_s(self, beats: list[Heartbeat]) -> float | None:
        """Seconds of a step: as this watcher sees them pass, or else as the workers measure them."""
        (first_s, first), (last_s, last) = self._rates[0], self._rates[-1]
        if last - first >= _RATE_STEPS and last_s > first_s:
            return (last_s - first_s) / (last - first)
        return statistics.median(known) if (known := [beat.step_s for beat in beats if beat.step_s > 0]) else None

    def _count_lanes(self, beats: list[Heartbeat]) -> None:
        for beat in beats:
            seen = self._beats.setdefault(beat.worker, set())
            if (beat.attempt, beat.beat) not in seen:
                seen.add((beat.attempt, beat.beat))
                self._lanes.setdefault(beat.worker, Counter()).update({busy.lane for busy in beat.busy})

    def _successions(self, beats: list[Heartbeat]) -> Iterator[Succession]:
        """The functions that took the place of others, in order of their start."""
        begun = {beat.worker: beat.attempt for beat in beats}
        functions = {(f.worker, f.attempt): f.started_at_s for f in list_functions(self._storage, self._keys)}
        for (worker, attempt), started_at_s in sorted(functions.items(), key=lambda item: (item[1], item[0])):
            if attempt > 0:
                key = self._keys.worker_report(worker, attempt - 1)
                report = find_readable_document(self._storage, WorkerReport, key)
                reason = _reason(attempt - 1, report, has_begun=begun.get(worker, -1) >= attempt)
                yield Succession(worker=worker, attempt=attempt, started_at_s=started_at_s, reason=reason)


def _reason(before: int, report: WorkerReport | None, *, has_begun: bool) -> str:
    if report is None:
        return f"as attempt {before} ended without a report" if has_begun else f"to take over from attempt {before}"
    if report.outcome is Outcome.HANDED_OVER:
        return f"after attempt {before} handed over"
    return f"as attempt {before} {report.outcome.value}" + (f": {report.error}" if report.error else "")


def _expected_usd(status: RunStatus, left_s: float | None) -> float | None:
    if status.verdict is Verdict.FINISHED:
        return status.run_usd
    if left_s is None or not status.run_s:
        return None
    return status.run_usd * (1 + left_s / status.run_s)


def _since(now: RequestCounts, before: RequestCounts) -> RequestCounts:
    return RequestCounts(
        lists=now.lists - before.lists,
        gets=now.gets - before.gets,
        empty_gets=now.empty_gets - before.empty_gets,
    )
