"""Each fault once, drawn by a fixed seed."""

import math

import pytest
import torch
from torch import Tensor

from funcpipe.testing.chaos import good, run
from funcpipe.testing.faults import Fault


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Tensor]:
    ending, tensors = run(0, Fault.NONE, None)
    assert tensors is not None, ending.error
    return tensors


@pytest.mark.slow
@pytest.mark.parametrize("fault", [fault for fault in Fault if fault is not Fault.NONE])
def test_a_disturbed_run_ends_with_the_same_bits(fault: Fault, undisturbed: dict[str, Tensor]) -> None:
    ending, tensors = run(1 + list(Fault).index(fault), fault, undisturbed)
    assert ending.outcome == "same bits", ending
    assert good(ending, within_s=math.inf)  # a run that hangs is ended by pytest, one that is slow is not wrong
    assert tensors is not None
    assert all(torch.equal(tensors[name], undisturbed[name]) for name in undisturbed)
