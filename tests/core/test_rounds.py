"""Rounds of local steps, against those of the reference in one process, which counts steps as it goes."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from funcpipe.core import ends_round, fragment_numbers, round_of, shift_of
from funcpipe.training.batches import Step
from funcpipe.training.plain_rounds import LocalSteps

sync_everys = st.integers(1, 50) | st.just("end")


@given(st.integers(1, 40), sync_everys, st.none() | st.integers(1, 50), st.integers(1, 6))
def test_fragments_meet_when_those_of_the_reference_do(
    steps: int, sync_every: int | str, validate_every: int | None, count: int
) -> None:
    taken = [Step(number=number, epoch=0, micro_batches=(), ends_epoch=False) for number in range(steps)]
    local = LocalSteps(sync_every=None if isinstance(sync_every, str) else sync_every, fragments=count)
    ends = range(validate_every - 1, steps, validate_every) if validate_every else ()
    expected = {step.number: fragments for step, fragments in local.meetings(taken, ends)}
    for fragment in range(count):
        shift = shift_of(fragment, sync_every=sync_every, fragments=count)
        where = [(step, round_at(step, sync_every, steps, validate_every, shift)) for step in range(steps)]
        met = [
            step
            for step in range(steps)
            if ends_round(step, sync_every=sync_every, steps=steps, validate_every=validate_every, shift=shift)
        ]
        assert met == [step for step, fragments in expected.items() if fragment in fragments]
        assert met == list(dict.fromkeys(one[-1] for _, one in where))
        rounds = list(dict.fromkeys(one for _, one in where))
        assert all(step in one for step, one in where)
        assert all(one.stop == later.start for one, later in pairwise(rounds))
        assert isinstance(sync_every, str) or all(len(one) <= sync_every for one in rounds)


def round_at(step: int, sync_every: int | str, steps: int, validate_every: int | None, shift: int) -> range:
    return round_of(step, sync_every=sync_every, steps=steps, validate_every=validate_every, shift=shift)


@given(st.lists(st.integers(0, 100), max_size=12), st.integers(1, 6))
def test_fragments_hold_whole_parameters_in_order_and_about_as_many_elements(sizes: list[int], count: int) -> None:
    numbers = fragment_numbers(sizes, count)
    assert numbers == sorted(numbers)
    assert all(0 <= number < count for number in numbers)
    held = [sum(size for size, number in zip(sizes, numbers, strict=True) if number == n) for n in range(count)]
    largest = max(sizes, default=0)
    assert all(abs(elements - sum(sizes) / count) <= largest for elements in held)


def test_fragments_of_a_small_stage() -> None:
    assert fragment_numbers([40, 10, 30, 20], 2) == [0, 0, 1, 1]
    assert fragment_numbers([90, 10], 3) == [1, 2]  # none is in the first
    assert fragment_numbers([0, 5, 0], 2) == [0, 1, 1]
