"""The functions of one run, as their client sees them: how they fare, what they said, what they cost."""

import time

from funcpipe.comm.keys import Keys
from funcpipe.core import Bill, PlatformSpec, WorkerReport, WorkerSpec, from_text
from funcpipe.errors import DeadlineExceeded, KeyMissing, WorkerFailed
from funcpipe.platforms.base import Handle, Platform, State, Storage

POLL_S = 0.02
"""Pause between two looks at functions or at what they wrote."""


class Fleet:
    """The functions of one run; on leaving it, none runs any more."""

    def __init__(self, platform: Platform, storage: Storage, keys: Keys, *, prices: PlatformSpec) -> None:
        self.storage = storage
        self.keys = keys
        self.handles: list[Handle] = []
        self._platform = platform
        self._prices = prices
        self._started_s: list[float] = []
        self._prices_usd_s: list[float] = []

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            self._platform.stop(handle)

    def invoke(self, spec: WorkerSpec) -> None:
        """Start the function of one worker."""
        self.handles.append(self._platform.invoke(spec))
        self._started_s.append(time.time())
        self._prices_usd_s.append(self._prices.size(spec.plan.stages[spec.stage].size).price_usd_s)

    def running(self) -> int:
        """How many functions still run; raises WorkerFailed if one has failed."""
        statuses = [(handle, self._platform.status(handle)) for handle in self.handles]
        failed = [(handle, status.reason) for handle, status in statuses if status.state is State.FAILED]
        if failed:
            raise _worst(self.keys.run, [(handle, reason, self.report(handle)) for handle, reason in failed])
        return sum(status.state is State.RUNNING for _, status in statuses)

    def report(self, handle: Handle) -> WorkerReport | None:
        """What the function said when it ended; None if it could not."""
        key = self.keys.worker_report(handle.worker)
        try:
            return from_text(WorkerReport, self.storage.get(key), source=key)
        except KeyMissing:
            return None

    def reports(self) -> tuple[WorkerReport, ...]:
        """What all functions said, all of them having ended."""
        found = [self.report(handle) for handle in self.handles]
        return tuple(report for report in found if report is not None)

    def wait(self, deadline_s: float) -> None:
        """Wait for all functions to end."""
        until_s = time.monotonic() + deadline_s
        while running := self.running():
            if time.monotonic() > until_s:
                raise DeadlineExceeded(
                    f"run {self.keys.run}: {running} functions still run {deadline_s:g} s after the last step"
                )
            time.sleep(POLL_S)

    def cost_usd(self) -> float:
        """Dollars for the functions' time so far."""
        now_s = time.time()
        return sum((now_s - start) * price for start, price in zip(self._started_s, self._prices_usd_s, strict=True))

    def bill(self) -> Bill:
        """What the functions took, all of them having ended."""
        reports = self.reports()
        seconds = [report.ended_at_s - start for report, start in zip(reports, self._started_s, strict=True)]
        puts, gets = sum(report.puts for report in reports), sum(report.gets for report in reports)
        prices = self._prices
        requests_usd = puts * prices.price_put_usd + gets * prices.price_get_usd
        return Bill(
            platform=prices.name,
            functions=len(reports),
            function_seconds=sum(seconds),
            puts=puts,
            gets=gets,
            compute_usd=sum(s * price for s, price in zip(seconds, self._prices_usd_s, strict=True)),
            request_usd=requests_usd + len(reports) * prices.price_invocation_usd,
        )


_Failed = tuple[Handle, str, WorkerReport | None]


def _worst(run: str, failed: list[_Failed]) -> WorkerFailed:
    """The error of the function that failed first; one that only waited in vain comes after all others."""

    def rank(item: _Failed) -> tuple[bool, float]:
        report = item[2]
        waited = report is not None and str(report.error).startswith(DeadlineExceeded.__name__)
        return waited, report.ended_at_s if report is not None else 0.0

    handle, reason, report = min(failed, key=rank)
    if report is None or report.error is None:
        return WorkerFailed(f"run {run}: worker {handle.worker} ({handle.name}) {reason}, without a word")
    where = f"in task {report.task}" if report.task else "outside its tasks"
    return WorkerFailed(f"run {run}: worker {handle.worker} failed {where}: {report.error}\n\n{report.traceback}")
