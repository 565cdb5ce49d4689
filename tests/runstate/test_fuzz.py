"""The short form of experiments/fuzz.py, and readers fed with bytes that hypothesis makes up."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.fuzz import READ, Target, attack, targets
from funcpipe.errors import FuncPipeError

TARGETS = targets()


@pytest.mark.parametrize("name", TARGETS)
def test_changed_inputs_are_read_or_refused(name: str) -> None:
    draw = random.Random(1)
    outcomes = {attack(TARGETS[name], draw) for _ in range(60 if name == "profile" else 300)}
    assert outcomes - {READ}


@settings(max_examples=60)
@given(st.sampled_from(sorted(TARGETS)), st.binary(max_size=300))
def test_any_bytes_are_refused(name: str, data: bytes) -> None:
    target: Target = TARGETS[name]
    try:
        target.read(target.seal(data))
    except FuncPipeError:
        return
    assert name == "keys"  # which may be well formed by chance
