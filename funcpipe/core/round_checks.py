"""The rules by which replicas may train alone and meet."""

from collections.abc import Sequence

from funcpipe.core import checks
from funcpipe.core.rounds import AUTO
from funcpipe.errors import InvalidValue


def check_sync_every(sync_every: int | str, words: Sequence[str]) -> None:
    """Raise InvalidValue unless it is a number of steps, or one of `words`."""
    if not isinstance(sync_every, str):
        checks.whole("sync_every", sync_every, 1)
    elif sync_every not in words:
        rule = f"must be a whole number of at least 1, or one of {', '.join(words)}"
        raise InvalidValue("sync_every", sync_every, rule)


def check_unused(name: str, value: float, usual: float) -> None:
    """Raise InvalidValue unless `value`, which says how replicas meet, is the `usual` one: they sum gradients."""
    if value != usual:
        raise InvalidValue(name, value, f"must be {usual} with sync_every=1: no replica is alone")


def check_meetings(steps: int | str, *, fragments: int, delay: int, sharded: bool) -> None:
    """Raise InvalidValue unless each of so many fragments can meet after a step of its own in a round of `steps`, one
    at a time, with a delay of so many steps.
    """
    checks.whole("sync_fragments", fragments, 1)
    checks.whole("sync_delay", delay, 0)
    if delay and sharded:
        rule = "must be 0 with shard_optimizer: who starts again would repeat the outer step of what it has summed"
        raise InvalidValue("sync_delay", delay, rule)
    if not isinstance(steps, str):
        _check_distances(steps, fragments, delay)
    elif steps != AUTO:
        if fragments > 1:
            rule = f"must be 1 with sync_every={steps!r}: all would meet at once"
            raise InvalidValue("sync_fragments", fragments, rule)
        if delay:
            raise InvalidValue("sync_delay", delay, f"must be 0 with sync_every={steps!r}: no step follows a meeting")


def _check_distances(steps: int, fragments: int, delay: int) -> None:
    if fragments > steps:
        rule = f"must be at most {steps}, the steps of a round, each of which at most one fragment meets after"
        raise InvalidValue("sync_fragments", fragments, rule)
    if delay * fragments >= steps:
        rule = f"must be less than the steps between meetings, {steps} / {fragments}, so that they do not overlap"
        raise InvalidValue("sync_delay", delay, rule)
