"""Rounds of gradients that travel during the last backward: the same bits as without, and as one process."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcpipe.core import Streams, Sync
from tests.e2e.networks import Lopsided
from tests.e2e.plans import even_plan, momentum
from tests.e2e.reference import largest_difference
from tests.examples import in_long_run
from tests.in_process import states, train_both
from tests.training import test_ties

WAYS = [(Sync.EXCHANGE, Streams(3, 1, 1)), (Sync.STREAMED, Streams(4, 2, 2)), (Sync.STREAMED, Streams(5, 1, 5))]


def model() -> nn.Module:
    torch.manual_seed(2)
    return Lopsided(wide=40, narrow=3).double()


def vectors() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(5, generator=generator).double(), torch.tensor(i % 5)) for i in range(27)]


def trained(sync: Sync, streams: Streams | None, *, replicas: int, recompute: bool) -> dict[str, Tensor]:
    """What every replica ends with, by worker and name."""
    sample = (torch.zeros(3, 5).double(),)
    plan = even_plan(
        model(), sample, stages=2, replicas=replicas, micro_batch=3, micro_batches=2, recompute=recompute, sync=sync
    )
    workers, expected = train_both(
        model(), replace(plan, streams=streams), vectors, loss=F.cross_entropy, optimizer=momentum, epochs=1
    )
    found = {
        f"{worker} {name}": tensor
        for worker, one in workers.items()
        for name, tensor in one.computation.state().state_dict().items()
    }
    first = {name.split(" ")[1]: tensor for name, tensor in found.items() if ".r0 " in name}
    assert largest_difference(first, expected.state_dict()) < 1e-10
    return found


@pytest.mark.parametrize(("replicas", "recompute"), [(3, True), *in_long_run([(2, True), (3, False)])])
def test_every_way_to_cut_the_gradients_gives_the_same_bits(replicas: int, recompute: bool) -> None:
    plain = trained(Sync.THREE_PHASE, None, replicas=replicas, recompute=recompute)
    for sync, streams in WAYS:
        found = trained(sync, streams, replicas=replicas, recompute=recompute)
        assert found.keys() == plain.keys()
        assert all(torch.equal(found[name], plain[name]) for name in plain)


def test_tied_parameters_are_summed_over_stages_before_they_travel() -> None:
    ids = (torch.zeros(2, 3, dtype=torch.long),)
    plan = even_plan(test_ties.model(), ids, stages=4, replicas=3, micro_batch=2, micro_batches=2, sync=Sync.STREAMED)
    plan = replace(plan, streams=Streams(6, 2, 3))
    workers, expected = train_both(
        test_ties.model(), plan, test_ties.data, loss=test_ties.loss, optimizer=momentum, epochs=1
    )
    assert largest_difference(states(workers), expected.state_dict()) < 1e-10
