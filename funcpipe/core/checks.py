"""Checks that values apply to their own fields; each raises InvalidValue with the name of the field."""

import dataclasses
import functools
import math
import typing
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, TypeVar

from funcpipe.errors import InvalidValue

E = TypeVar("E", bound=Enum)


def at_least(field: str, value: float, low: float) -> None:
    """Raise InvalidValue unless `value` is a finite number and not below `low`."""
    if not _is_number(value) or not math.isfinite(value) or value < low:
        raise InvalidValue(field, value, f"must be at least {low:g}")


def positive(field: str, value: float) -> None:
    """Raise InvalidValue unless `value` is a finite number above zero."""
    if not _is_number(value) or not math.isfinite(value) or value <= 0:
        raise InvalidValue(field, value, "must be above 0")


def whole(field: str, value: int, low: int) -> None:
    """Raise InvalidValue unless `value` is a whole number and not below `low`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise InvalidValue(field, value, f"must be a whole number of at least {low}")


def all_at_least(owner: object, low: float, *fields: str) -> None:
    """Check with `at_least` those `fields` of a dataclass; those that may be None may also be that."""
    for field, value in _given(owner, fields):
        at_least(field, value, low)


def all_positive(owner: object, *fields: str) -> None:
    """Check with `positive` those `fields` of a dataclass; those that may be None may also be that."""
    for field, value in _given(owner, fields):
        positive(field, value)


def all_whole(owner: object, low: int, *fields: str) -> None:
    """Check with `whole` those `fields` of a dataclass; those that may be None may also be that."""
    for field, value in _given(owner, fields):
        whole(field, value, low)


def _given(owner: Any, fields: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the fields with their values, without those that are None and may be."""
    optional = _optional(owner.__class__)
    for field in fields:
        value = getattr(owner, field)
        if value is not None or field not in optional:
            yield field, value


@functools.cache
def _optional(kind: type[Any]) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(kind) if type(None) in typing.get_args(field.type))


def choose(owner: object, field: str, kind: type[Enum], *, optional: bool = False) -> None:
    """Make `field` of the frozen dataclass `owner` a member of `kind`; it may be its value, a string.

    None stays None if the field is `optional`. Raises InvalidValue, with all choices.
    """
    value = getattr(owner, field)
    if not isinstance(value, kind) and not (optional and value is None):
        object.__setattr__(owner, field, choice(field, value, kind))


def kind_of(field: str, value: object, kind: type) -> None:
    """Raise InvalidValue unless `value` is of the class `kind`."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise InvalidValue(field, value, f"must be {article} {kind.__name__}")


def filled(field: str, value: Sequence[object]) -> None:
    """Raise InvalidValue unless `value` has at least one item."""
    if not value:
        raise InvalidValue(field, value, "must not be empty")


def distinct(field: str, names: Sequence[str]) -> None:
    """Raise InvalidValue if a name occurs twice in `names`."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidValue(field, name, "must not hold the same name twice")
        seen.add(name)


def choice(field: str, value: object, kind: type[E]) -> E:
    """Return `value` as a member of `kind`, which may be given by its text; raises InvalidValue, with all choices."""
    try:
        return kind(value)
    except ValueError:
        raise InvalidValue(field, value, f"must be one of {', '.join(str(one.value) for one in kind)}") from None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
