"""How many examples property tests draw, and which cases of a table only the long run takes."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings


def at_most(count: int) -> settings:
    """As many examples as the profile asks for, which are few in `make check`, but no more than `count`."""
    return settings(max_examples=min(count, settings().max_examples))


def in_long_run(cases: Iterable[Any]) -> list[Any]:
    """Parameter sets, tuples or single values, that only `make test-long` takes."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long) for case in cases]
