"""Checks that values apply to their own fields; each raises InvalidValue with the name of the field."""

import math
from collections.abc import Sequence

from funcpipe.errors import InvalidValue


def at_least(field: str, value: float, low: float) -> None:
    """`value` is finite and not below `low`."""
    if not math.isfinite(value) or value < low:
        raise InvalidValue(field, value, f"must be at least {low:g}")


def positive(field: str, value: float) -> None:
    """`value` is finite and above zero."""
    if not math.isfinite(value) or value <= 0:
        raise InvalidValue(field, value, "must be above 0")


def filled(field: str, value: Sequence[object]) -> None:
    """`value` has at least one item."""
    if not value:
        raise InvalidValue(field, value, "must not be empty")


def distinct(field: str, names: Sequence[str]) -> None:
    """No name occurs twice in `names`."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidValue(field, name, "must not hold the same name twice")
        seen.add(name)
