"""Predicted and observed quantities of a run: one line of the local history."""

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from funcpipe.core import checks

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
        for name in ("predicted_s", "observed_s", "at_s"):
            checks.at_least(name, getattr(self, name), 0)
