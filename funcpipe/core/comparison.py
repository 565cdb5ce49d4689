"""A comparison of ways to do a job, and the outcome of a run by one of them: lines of the local history."""

from dataclasses import dataclass
from typing import ClassVar

from funcpipe.core import checks
from funcpipe.core.job_spec import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedWay:
    """One way of a comparison, as it was predicted; `rented` says in words what it rents.

    Runs by it have the same `key`: that of its plan, or, without one, of what is rented. `place` is where that is: a
    platform, or a market of machines. `sizes` are those of a plan's functions, joined by +, and empty without a plan.
    Of `seconds`, `start_s` pass before the first of `iterations`; of `usd`, `requests_usd` do not grow with the time.
    The time has a standard deviation of `spread` times itself; `losses_s` machines a second are lost, each of which
    adds `delay_s`.
    """

    way: str
    key: str
    rented: str
    place: str
    seconds: float
    usd: float
    iterations: float
    start_s: float = 0.0
    requests_usd: float = 0.0
    sizes: str = ""
    spread: float = 0.0
    losses_s: float = 0.0
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("way", "key", "place"):
            checks.filled(name, getattr(self, name))
        for name in ("seconds", "usd", "iterations", "start_s", "requests_usd", "spread", "losses_s", "delay_s"):
            checks.at_least(name, getattr(self, name), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The ways that were found for `job`, and which of them was recommended, if any.

    The same comparison, made again, has the same `key`. It was made `at_s` seconds after 1970.
    """

    FORMAT: ClassVar[str] = "funcpipe.comparison/1"

    key: str
    job: JobSpec
    model: str
    platform: str
    market: str
    ways: tuple[ComparedWay, ...]
    recommended: str | None
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WayRun:
    """The outcome of `run`, which trained by `way` of the comparison with the key `comparison`; it ended at `at_s`.

    It `ran_on` that way's place, or what took its place, such as `local`. It did `share` of the job's work. `seconds`
    and dollars include the start, unless `with_start` is false: of machines that were there already.
    """

    FORMAT: ClassVar[str] = "funcpipe.way-run/1"

    comparison: str
    way: str
    run: str
    ran_on: str
    share: float
    seconds: float
    usd: float
    at_s: float
    with_start: bool = True

    def __post_init__(self) -> None:
        for name in ("comparison", "way", "run", "ran_on"):
            checks.filled(name, getattr(self, name))
        for name in ("share", "seconds"):
            checks.positive(name, getattr(self, name))
        checks.at_least("usd", self.usd, 0)
