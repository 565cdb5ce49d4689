"""Parameters that several stages hold: trained as one, whatever the plan."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcpipe.core import Routes, TieRoute, find_routes
from funcpipe.core.profile import TiedParameter
from tests.e2e.plans import even_plan, momentum
from tests.e2e.reference import largest_difference
from tests.in_process import states, train_both

WORDS, SAMPLES = 11, 18


class TiedThrice(nn.Module):
    """One weight is embedding, middle and head; another is used twice; the loss does not depend on the last use of the
    gate.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WORDS)
        self.inner = nn.Linear(WORDS, WORDS)
        self.middle = nn.Linear(WORDS, WORDS, bias=False)
        self.norm = nn.LayerNorm(WORDS)
        self.gate = nn.Linear(WORDS, WORDS)
        self.head = nn.Linear(WORDS, WORDS)
        self.middle.weight = self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.inner(self.words(ids))
        x = self.norm(self.middle(torch.tanh(x)))
        x = self.gate(self.inner(x))
        unused = self.gate(x).detach()
        output: Tensor = self.head(torch.tanh(x)) + 0.0 * unused
        return output


def model() -> nn.Module:
    torch.manual_seed(4)
    return TiedThrice().double()


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, WORDS, (SAMPLES, 3), generator=generator)
    return [(row, row.roll(1)) for row in ids]


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@pytest.mark.parametrize(("stages", "replicas"), [(2, 1), (3, 2), (7, 1), pytest.param(4, 3, marks=pytest.mark.long)])
def test_tied_parameters_train_as_in_one_process_and_their_copies_stay_equal(stages: int, replicas: int) -> None:
    ids = torch.zeros(2, 3, dtype=torch.long)
    plan = even_plan(model(), (ids,), stages=stages, replicas=replicas, micro_batch=2, micro_batches=2)
    workers, expected = train_both(model(), plan, data, loss=loss, optimizer=momentum)
    assert largest_difference(states(workers), expected.state_dict()) < 1e-10
    held = [worker.computation.state().state_dict() for worker in workers.values()]
    tied = [state[name] for state in held for name in ("words.weight", "middle.weight", "head.weight") if name in state]
    assert len(tied) > replicas
    assert all(torch.equal(a, b) for a, b in itertools.pairwise(tied))


def test_parameters_of_the_same_layers_share_a_route_and_what_one_stage_holds_has_none() -> None:
    ties = [
        TiedParameter(name="a", layers=(0, 4), parameter_bytes=8),
        TiedParameter(name="b", layers=(1, 3, 5), parameter_bytes=4),
        TiedParameter(name="c", layers=(2, 3), parameter_bytes=2),
        TiedParameter(name="d", layers=(0, 4), parameter_bytes=1),
    ]
    assert find_routes([0, 0, 1, 1, 2, 2], [], ties) == Routes(
        activations=(),
        gradients=(),
        ties=(
            TieRoute(stages=(0, 2), parameters=("a", "d"), payload_bytes=9),
            TieRoute(stages=(0, 1, 2), parameters=("b",), payload_bytes=4),
        ),
    )
