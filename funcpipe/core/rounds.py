"""The rounds of local steps: replicas train alone in the steps of a round, and meet after its last one.

A round ends after the last step of a run, before a validation, and when `sync_every` steps have passed since the last
validation, or since step 0. That depends on numbers of steps alone, so functions that start again find the same rounds.
"""

END = "end"
"""The `sync_every` of replicas that meet before validations and in the end, and never otherwise."""

AUTO = "auto"
"""The `sync_every` that is to be chosen by a planner."""


def round_of(step: int, *, sync_every: int | str, steps: int, validate_every: int | None = None) -> range:
    """Return the steps of the round with `step`, in a run of `steps` that is validated after every `validate_every`.

    >>> [round_of(step, sync_every=3, steps=7, validate_every=4) for step in (1, 3, 6)]
    [range(0, 3), range(3, 4), range(4, 7)]
    """
    began = step - step % validate_every if validate_every else 0
    stop = min(began + validate_every, steps) if validate_every else steps
    if isinstance(sync_every, str):
        return range(began, stop)
    first = step - (step - began) % sync_every
    return range(first, min(first + sync_every, stop))


def ends_round(step: int, *, sync_every: int | str, steps: int, validate_every: int | None = None) -> bool:
    """Return True if replicas meet after `step`, as in `round_of`."""
    return round_of(step, sync_every=sync_every, steps=steps, validate_every=validate_every)[-1] == step
