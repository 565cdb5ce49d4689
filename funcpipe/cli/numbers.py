"""Types of numeric options: what is out of range is refused with the range, before anything slow is loaded."""

import argparse
import math
from collections.abc import Callable

_MOST = 10**9
"""More samples, steps, functions or megabytes than any job has, and still fast to plan with."""


def whole(low: int = 1, high: int = _MOST) -> Callable[[str], int]:
    """The type of an option that takes a whole number from `low` to `high`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be a whole number from {low} to {high}, got {text!r}")
        return value

    return read


def number(*, above: float | None = None, low: float | None = None) -> Callable[[str], float]:
    """The type of an option that takes a finite number: one above `above`, or one that is at least `low`."""
    rule = "a number" if above is None and low is None else f"above {above:g}" if low is None else f"at least {low:g}"

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or (above is not None and value <= above) or (low is not None and value < low):
            raise argparse.ArgumentTypeError(f"must be {rule}, got {text!r}")
        return value

    return read


positive = number(above=0)
"""Seconds, dollars, rates: anything above 0."""

not_negative = number(low=0)
"""A share, or what time is worth: 0 or more."""
