"""Readers of what comes from outside, fed with changed inputs and with bytes that hypothesis makes up."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.errors import FuncPipeError
from tests.examples import at_most
from tests.runstate.readers import READ, Target, attack, targets

TARGETS = targets()


@pytest.mark.parametrize("name", TARGETS)
def test_changed_inputs_are_read_or_refused(name: str) -> None:
    draw = random.Random(1)
    outcomes = {attack(TARGETS[name], draw) for _ in range(300)}
    assert outcomes - {READ}


@pytest.mark.long
@pytest.mark.parametrize("name", TARGETS)
def test_twenty_thousand_changed_inputs_are_read_or_refused(name: str) -> None:
    draw = random.Random(0)
    assert {attack(TARGETS[name], draw) for _ in range(20_000)} - {READ}


@at_most(60)
@given(st.sampled_from(sorted(TARGETS)), st.binary(max_size=300))
def test_any_bytes_are_refused(name: str, data: bytes) -> None:
    target: Target = TARGETS[name]
    try:
        target.read(target.seal(data))
    except FuncPipeError:
        return
    assert name == "keys"  # which may be well formed by chance
