"""Each fault once, drawn by a fixed seed."""

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from funcpipe.testing.faults import Fault
from funcpipe.training.plain_rounds import train_in_turn
from tests.examples import in_long_run
from tests.support import chaos, faulty_threads
from tests.support.chaos import Ending, good, run


@pytest.fixture(scope="module")
def undisturbed() -> Mapping[str, Tensor]:
    ending, tensors = run(0, Fault.NONE, None)
    assert tensors is not None, ending.error
    return tensors


@pytest.mark.parametrize("fault", [fault for fault in Fault if fault not in (Fault.NONE, Fault.ZOMBIE)])
def test_a_disturbed_run_ends_with_the_same_bits(fault: Fault, undisturbed: Mapping[str, Tensor]) -> None:
    check_the_same(*disturbed(fault, undisturbed), undisturbed)


LATE = {"sync_fragments": 2, "sync_delay": 1}


@pytest.mark.parametrize(
    ("fault", "meets"),
    [
        *[(Fault.MIXED, {}), (Fault.KILL, LATE)],
        *in_long_run([(Fault.KILL, {}), (Fault.CLIENT, {}), (Fault.MIXED, LATE), (Fault.CLIENT, LATE)]),
    ],
)
def test_so_does_one_whose_replicas_train_alone(
    fault: Fault, meets: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = chaos.job()
    plan = replace(made.plan, sync_every=4, outer_momentum=0.5, **meets)  # type: ignore[arg-type]
    made = replace(made, plan=plan)
    monkeypatch.setattr(chaos, "job", lambda deadline_s: replace(made, message_deadline_s=deadline_s))
    local = made.local_steps()
    assert local is not None
    trained = train_in_turn(
        *(chaos.model(), made.graph, chaos.data(), list(made.batches.steps_from(0, made.epochs))),
        recipe=made.recipe,
        seed=0,
        replicas=plan.replicas,
        local=local,
    )
    expected = trained.state_dict()
    check_the_same(*disturbed(fault, expected), expected)


def test_functions_that_sleep_past_deadlines_change_no_bit(
    undisturbed: Mapping[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine may be so busy that messages miss the short deadline for that alone: the run says so, nothing else goes
    wrong, and it is made again with a longer deadline, and longer sleep.
    """
    for deadline_s in (faulty_threads.SHORT_DEADLINE_S, 10.0, 30.0):
        monkeypatch.setattr(chaos, "SHORT_DEADLINE_S", deadline_s)
        monkeypatch.setattr(faulty_threads, "SHORT_DEADLINE_S", deadline_s)
        ending, tensors = disturbed(Fault.ZOMBIE, undisturbed)
        assert good(ending, within_s=math.inf), ending
        if tensors is not None:
            break
        assert "has not come within" in ending.error or "has not ended step" in ending.error, ending
    check_the_same(ending, tensors, undisturbed)


def disturbed(fault: Fault, undisturbed: Mapping[str, Tensor]) -> tuple[Ending, Mapping[str, Tensor] | None]:
    return run(1 + list(Fault).index(fault), fault, undisturbed)


def check_the_same(ending: Ending, tensors: Mapping[str, Tensor] | None, undisturbed: Mapping[str, Tensor]) -> None:
    assert ending.outcome == "same bits", ending
    assert good(ending, within_s=math.inf)  # a run that hangs is ended by pytest, one that is slow is not wrong
    assert tensors is not None
    assert all(torch.equal(tensors[name], undisturbed[name]) for name in undisturbed)
