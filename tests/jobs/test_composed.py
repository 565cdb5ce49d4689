"""Whatever lies around a model: a job is equal to plain PyTorch, or refused before anything starts."""

import random

from hypothesis import given
from hypothesis import strategies as st

from tests.examples import at_most
from tests.jobs.composed import drawn, outcome


@at_most(20)
@given(st.integers(0, 2**32 - 1))
def test_a_composed_job_is_equal_or_refused(seed: int) -> None:
    outcome(drawn(random.Random(seed)))
