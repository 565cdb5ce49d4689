"""How many examples property tests draw."""

from hypothesis import settings


def at_most(count: int) -> settings:
    """As many examples as the profile asks for, which are few in `make check`, but no more than `count`."""
    return settings(max_examples=min(count, settings().max_examples))
