"""Rounds of local steps, against those of the reference in one process, which counts steps as it goes."""

from hypothesis import given
from hypothesis import strategies as st

from funcpipe.core import ends_round, round_of
from funcpipe.training.batches import Step
from funcpipe.training.plain_rounds import LocalSteps


@given(st.integers(1, 40), st.integers(1, 50) | st.just("end"), st.none() | st.integers(1, 50))
def test_rounds_are_those_of_the_reference(steps: int, sync_every: int | str, validate_every: int | None) -> None:
    taken = [Step(number=number, epoch=0, micro_batches=(), ends_epoch=False) for number in range(steps)]
    local = LocalSteps(sync_every=None if isinstance(sync_every, str) else sync_every)
    ends = range(validate_every - 1, steps, validate_every) if validate_every else ()
    expected = [[step.number for step in steps_of_round] for steps_of_round in local.rounds(taken, ends)]
    of_step = [
        round_of(step, sync_every=sync_every, steps=steps, validate_every=validate_every) for step in range(steps)
    ]
    assert [list(one) for one in dict.fromkeys(of_step)] == expected
    assert all(step in one for step, one in enumerate(of_step))
    last = [
        step
        for step in range(steps)
        if ends_round(step, sync_every=sync_every, steps=steps, validate_every=validate_every)
    ]
    assert last == [one[-1] for one in expected]
