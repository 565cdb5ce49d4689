"""The rounds of local steps: replicas train alone in the steps of a round, and meet after its last one.

A round ends after the last step of a run, before a validation, and when `sync_every` steps have passed since the last
validation, or since step 0. That depends on numbers of steps alone, so functions that start again find the same rounds.

Where the parameters of a stage meet in fragments, each fragment has rounds of its own: those of fragment f of F begin
f sync_every / F steps later, rounded down. With `sync_every` 4, two fragments and 10 steps, these meet after the steps

    fragment 0    3, 7, 9
    fragment 1    1, 5, 9

since all rounds end with the run.
"""

import itertools
from collections.abc import Sequence

END = "end"
"""The `sync_every` of replicas that meet before validations and in the end, and never otherwise."""

AUTO = "auto"
"""The `sync_every` that is to be chosen by a planner."""


def round_of(
    step: int, *, sync_every: int | str, steps: int, validate_every: int | None = None, shift: int = 0
) -> range:
    """Return the steps of the round with `step`, in a run of `steps` that is validated after every `validate_every`.

    With a `shift`, less than `sync_every`, the first round of the run, and that after each validation, has only so many
    steps.

    >>> [round_of(step, sync_every=3, steps=7, validate_every=4) for step in (1, 3, 6)]
    [range(0, 3), range(3, 4), range(4, 7)]
    >>> [round_of(step, sync_every=4, steps=10, shift=2) for step in (1, 2, 9)]
    [range(0, 2), range(2, 6), range(6, 10)]
    """
    began = step - step % validate_every if validate_every else 0
    stop = min(began + validate_every, steps) if validate_every else steps
    if isinstance(sync_every, str):
        return range(began, stop)
    first = step - (step - began - shift) % sync_every
    return range(max(first, began), min(first + sync_every, stop))


def ends_round(
    step: int, *, sync_every: int | str, steps: int, validate_every: int | None = None, shift: int = 0
) -> bool:
    """Return True if replicas meet after `step`, as in `round_of`."""
    found = round_of(step, sync_every=sync_every, steps=steps, validate_every=validate_every, shift=shift)
    return found[-1] == step


def shift_of(fragment: int, *, sync_every: int | str, fragments: int) -> int:
    """Return by how many steps the rounds of `fragment`, one of `fragments`, are later than those of the first."""
    return 0 if isinstance(sync_every, str) else fragment * sync_every // fragments


def fragment_numbers(sizes: Sequence[int], fragments: int) -> list[int]:
    """Return the fragment of each parameter of a stage, given their elements in the order of the stage.

    The elements are cut into `fragments` equal ranges, and a parameter belongs to the one in which its middle lies. So
    fragments hold whole parameters, one after the other; where parameters are few or large, some hold none.

    >>> fragment_numbers([40, 10, 30, 20], 2), fragment_numbers([90, 10], 3)
    ([0, 0, 1, 1], [1, 2])
    """
    starts = itertools.accumulate(sizes, initial=0)
    whole = max(2 * sum(sizes), 1)
    found = (fragments * (2 * start + size) // whole for start, size in zip(starts, sizes, strict=False))
    return [min(number, fragments - 1) for number in found]
