"""The start of a function: the parts that it takes, and how ready its environment was."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from statistics import median

from funcpipe.core import checks


class StartPart(Enum):
    """A part of a start, in the order in which they come.

    The platform's launch rate lets it begin (in estimates) and makes an environment, an interpreter begins, torch and
    our modules are imported, the stage's code and tensors are read, and the rest is set up: lease, optimiser,
    checkpoint. A successor waits for its predecessor.
    """

    LAUNCH = "launch"
    ENVIRONMENT = "environment"
    INTERPRETER = "interpreter"
    TORCH = "torch"
    MODULES = "modules"
    CODE = "code"
    TENSORS = "tensors"
    WARM_UP = "warm-up"
    PREDECESSOR = "predecessor"
    SETUP = "setup"


class Readiness(Enum):
    """The environment that a function began in, from the least ready one on.

    A new process; one that was forked with torch and our modules; one that was forked with the stage's code and tensors
    too, from a template process; one that had run another function before.
    """

    COLD = "cold"
    IMPORTED = "imported"
    TEMPLATE = "template"
    REUSED = "reused"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTimes:
    """The seconds of each part of a start, by the names of `StartPart`, and of the first step, once there was one."""

    readiness: Readiness
    parts: Mapping[str, float] = field(default_factory=dict, hash=False)
    first_step_s: float | None = None

    def __post_init__(self) -> None:
        checks.choose(self, "readiness", Readiness)

    @property
    def seconds(self) -> float:
        """From the invocation to the first task, but for the wait for a predecessor."""
        return sum(value for name, value in self.parts.items() if name != StartPart.PREDECESSOR.value)


def median_parts(starts: Iterable[StartTimes]) -> dict[str, float]:
    """Return the median of each part that any of `starts` has, where one without it counts as 0."""
    found = list(starts)
    names = [part.value for part in StartPart if any(part.value in start.parts for start in found)]
    return {name: median(start.parts.get(name, 0.0) for start in found) for name in names}
