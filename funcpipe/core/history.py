"""Lines of the local history: observed quantities of runs, comparisons of ways to do a job, and their outcomes."""

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from funcpipe.core import checks
from funcpipe.core.provision import JobSpec

LOCAL = "local"


def local_place(limits: str) -> str:
    """Return the name of the place of local functions that have the limits of the platform of that name."""
    return LOCAL if limits == LOCAL else f"{LOCAL} like {limits}"


class Quantity(Enum):
    """The kind of quantity: a function's work of one iteration, its start, or the whole iteration."""

    COMPUTE = "compute"
    TRANSFER = "transfer"
    START_UP = "start-up"
    ITERATION = "iteration"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One quantity of one run: seconds as `predicted_s` for `platform`, and as `observed_s` where it ran.

    `ran_on` is that platform too, or what took its place: `local`, or `local like aws-lambda`. `size` is that of the
    functions; sizes of one iteration are joined by +. `compute` are forwards and backwards, `transfer` the activations
    and gradients that stages send each other, both of one function in one iteration; `start-up` lasts from the
    invocation to the function's first line. The run ended `at_s` seconds after 1970.
    """

    FORMAT: ClassVar[str] = "funcpipe.observation/1"

    run: str
    platform: str
    ran_on: str
    size: str
    model: str
    quantity: Quantity
    predicted_s: float
    observed_s: float
    at_s: float

    def __post_init__(self) -> None:
        checks.choose(self, "quantity", Quantity)
        for name in ("run", "platform", "ran_on", "size"):
            checks.kind_of(name, getattr(self, name), str)
            checks.filled(name, getattr(self, name))
        checks.all_at_least(self, 0, "predicted_s", "observed_s", "at_s")


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
        checks.all_at_least(self, 0, "seconds", "usd", "iterations", "start_s", "requests_usd")
        checks.all_at_least(self, 0, "spread", "losses_s", "delay_s")


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
        checks.all_positive(self, "share", "seconds")
        checks.at_least("usd", self.usd, 0)
