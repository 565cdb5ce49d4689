"""The limits of a sweep: how many trials may start, and when; and what all of them are expected to take and to cost.

A trial is expected to cost what the dearest one did that has ended, and before any has, what was estimated.
"""

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from funcpipe.core import JobEstimate, PlatformSpec, RunLimits
from funcpipe.core.texts import time_text, usd_text
from funcpipe.platforms.launch_rate import LaunchRate

_STOPS_WITHIN_S = 3.0
"""Seconds that functions may run on, and cost, once a limit is reached: they are seen late, and end late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """The dollars of one trial that runs: so far, what it is expected to cost in all, and in a second."""

    usd: float
    expected_usd: float
    usd_s: float


class Budget:
    """The dollars and the time of a sweep so far, against its `limits`."""

    def __init__(
        self,
        limits: RunLimits,
        *,
        spent_usd: float = 0.0,
        elapsed_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits, self._clock = limits, clock
        self._began_s = clock() - elapsed_s
        self.ended_usd = spent_usd
        self._trial: tuple[float, float] | None = None
        self._ended = False

    @property
    def elapsed_s(self) -> float:
        """Seconds since the sweep began, those of earlier clients included."""
        return self._clock() - self._began_s

    @property
    def left_s(self) -> float | None:
        """Seconds to the deadline, if there is one."""
        return None if self._limits.deadline_s is None else max(self._limits.deadline_s - self.elapsed_s, 0.001)

    def estimated(self, estimate: JobEstimate | None) -> None:
        """Expect trials to take what is estimated, as long as none has ended."""
        if estimate is not None and self._trial is None:
            client_usd = estimate.client.requests_usd + estimate.traffic_usd  # a sweep watches in another way
            self._trial = (estimate.cost_usd - client_usd, estimate.seconds)

    def ended(self, usd: float, seconds: float, *, whole: bool) -> None:
        """Note the dollars of a trial that has ended, and of a `whole` one what others will take."""
        self.ended_usd += usd
        if whole:
            before = self._trial if self._trial is not None and self._ended else (0.0, 0.0)
            self._trial, self._ended = (max(before[0], usd), max(before[1], seconds)), True

    @property
    def trial_usd(self) -> float:
        """The dollars that a trial is expected to cost."""
        return self._trial[0] if self._trial else 0.0

    @property
    def trial_s(self) -> float:
        """The seconds that a trial is expected to take."""
        return self._trial[1] if self._trial else 0.0

    def may_start(self, running: Sequence[Spending], client_usd: float) -> bool:
        """Return True if one more trial, with all that run, is expected to end within the limits."""
        left_s = self.left_s
        if left_s is not None and self.trial_s > left_s:
            return False
        most_usd = self._limits.max_usd
        return most_usd is None or self._projected_usd(running, client_usd) + self.trial_usd <= most_usd

    def to_stop(self, running: Sequence[Spending], client_usd: float) -> int:
        """Return how many of the trials that run, the last of them, must end now for the others to end within limits.

        All must at the deadline, and when what they cost until they have ended reaches the limit of dollars.
        """
        left_s, most_usd = self.left_s, self._limits.max_usd
        if left_s is not None and left_s <= 0.001:
            return len(running)
        if most_usd is None:
            return 0
        now_usd = self.ended_usd + client_usd + sum(one.usd + one.usd_s * _STOPS_WITHIN_S for one in running)
        if now_usd >= most_usd:
            return len(running)
        for stopped in range(len(running)):
            kept, ended = running[: len(running) - stopped], running[len(running) - stopped :]
            if self._projected_usd(kept, client_usd) + sum(one.usd for one in ended) <= most_usd:
                return stopped
        return max(len(running) - 1, 0)  # the last one may cost less than expected

    def _projected_usd(self, running: Sequence[Spending], client_usd: float) -> float:
        return self.ended_usd + client_usd + sum(max(one.usd, one.expected_usd) for one in running)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepEstimate:
    """The prediction for `trials` trials, of which `at_once` run side by side: dollars and seconds, as ranges.

    The lower end is for a sweep whose pruner ends all trials but the first at their first validation.
    """

    trials: int
    at_once: int
    trial_usd: float
    trial_s: float
    low_usd: float
    high_usd: float
    low_s: float
    high_s: float
    platform: str

    def line(self, max_usd: float | None = None) -> str:
        """Return the estimate in one line."""
        usd = " to ".join(dict.fromkeys(f"${usd_text(value)}" for value in (self.low_usd, self.high_usd)))
        seconds = " to ".join(dict.fromkeys(time_text(value) for value in (self.low_s, self.high_s)))
        cap = "" if max_usd is None else f", cap ${max_usd:g}"
        return f"{self.trials} trials, {self.at_once} at once, about {seconds}, {usd} on {self.platform}{cap}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Waves:
    """The seconds at which simulated trials start and end."""

    starts_s: tuple[float, ...]
    ends_s: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Seconds until the last one has ended."""
        return max(self.ends_s, default=0.0)


def simulate_waves(
    durations_s: Sequence[float], *, at_once: int, spec: PlatformSpec, functions: int = 1, client_s: float = 0.0
) -> Waves:
    """Return when trials start and end of which each takes so many seconds, from its start on, and some functions.

    The client takes `client_s` to start one, and no more than `at_once` run, nor more than the launch rate admits.
    """
    now_s = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    rate, running = LaunchRate(spec, clock=lambda: now_s, sleep=sleep), list[float]()
    starts, ends = list[float](), list[float]()
    for duration_s in durations_s:
        if len(running) >= at_once:
            now_s = max(now_s, heapq.heappop(running))
        now_s += client_s
        rate.take(functions)
        starts.append(now_s)
        ends.append(now_s + duration_s)
        heapq.heappush(running, ends[-1])
    return Waves(starts_s=tuple(starts), ends_s=tuple(ends))


def estimate_sweep(
    trial: JobEstimate, *, trials: int, at_once: int, spec: PlatformSpec, functions: int, first_share: float | None
) -> SweepEstimate:
    """Return the prediction for trials of which each takes what `trial` says, and some functions.

    With a pruner, `first_share` of the training is over at a trial's first validation.
    """
    client_usd = trial.client.requests_usd + trial.traffic_usd
    whole_usd, whole_s = trial.cost_usd - client_usd, trial.seconds
    share = 1.0 if first_share is None else first_share
    fixed_usd, fixed_s = trial.start.cost_usd, trial.start.seconds
    short_usd, short_s = fixed_usd + share * (whole_usd - fixed_usd), fixed_s + share * (whole_s - fixed_s)
    high = simulate_waves([whole_s] * trials, at_once=at_once, spec=spec, functions=functions)
    low = simulate_waves([whole_s, *[short_s] * (trials - 1)], at_once=at_once, spec=spec, functions=functions)
    return SweepEstimate(
        trials=trials,
        at_once=at_once,
        trial_usd=whole_usd,
        trial_s=whole_s,
        low_usd=whole_usd + (trials - 1) * short_usd,
        high_usd=trials * whole_usd,
        low_s=low.seconds,
        high_s=high.seconds,
        platform=trial.platform,
    )
