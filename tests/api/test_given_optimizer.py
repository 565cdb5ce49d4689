"""Runs with an optimiser and a scheduler that the user has made: a script's weights, and a script's optimiser after."""

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import lr_scheduler as lr

from funcpipe import FuncPipe, ServerCluster, ServerWorker
from funcpipe.core import Plan
from funcpipe.errors import InputError, InvalidValue
from tests.api.threads import data, functions_in_threads, network, numbers, script
from tests.e2e.plans import even_plan


def plan() -> Plan:
    sample = (torch.zeros(4, 4, dtype=torch.float64),)
    return even_plan(network(), sample, stages=2, replicas=1, micro_batch=4, micro_batches=2)


def made(model: nn.Sequential) -> tuple[Optimizer, lr.LRScheduler]:
    groups = [{"params": model[0].parameters(), "weight_decay": 0.1}, {"params": model[2].parameters(), "lr": 0.02}]
    optimizer = AdamW(groups, lr=0.01)
    parts = [lr.LinearLR(optimizer, total_iters=2), lr.StepLR(optimizer, 1, 0.5)]
    return optimizer, lr.SequentialLR(optimizer, parts, [2])


def test_a_run_goes_on_with_what_a_script_has_made_and_leaves_what_a_script_would() -> None:
    """First a script trains, then a run, then both learning rates are changed, then another run."""
    model, other = network(), network()
    own, others = made(model), made(other)
    script(other, *others, epochs=1)
    script(model, *own, epochs=1)
    pipe = FuncPipe(model, loss_fn=nn.functional.cross_entropy, optimizer=own[0], scheduler=own[1])
    with functions_in_threads():
        for rate in (None, 0.03):
            if rate is not None:
                for optimizer in (own[0], others[0]):
                    optimizer.param_groups[1]["lr"] = rate
            pipe.train(data(), epochs=2, plan=plan(), shuffle=False, progress=False)
            script(other, *others, epochs=2)
            assert numbers(model.state_dict()) == pytest.approx(numbers(other.state_dict()), abs=1e-12)
            assert numbers(own[0].state_dict()) == pytest.approx(numbers(others[0].state_dict()), abs=1e-12)
            assert numbers(own[1].state_dict()) == pytest.approx(numbers(others[1].state_dict()), abs=1e-12)


def test_one_that_trains_a_loss_too_must_be_new() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return nn.functional.cross_entropy(output * self.scale, target)

    model, loss = network(), Loss()
    optimizer = SGD([*model.parameters(), *loss.parameters()], lr=0.1, momentum=0.9)
    inputs, targets = data().tensors
    loss(model(inputs), targets).backward()
    optimizer.step()
    pipe = FuncPipe(model, loss_fn=loss, optimizer=optimizer)
    with (
        functions_in_threads(),
        pytest.raises(InputError, match=r"has taken steps already, and trains .*scale of the lo"),
    ):
        pipe.train(data(), plan=plan(), progress=False)


def test_training_around_a_server_begins_with_a_new_one() -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    pipe = FuncPipe(model, loss_fn=nn.functional.cross_entropy, optimizer=optimizer)
    optimizer.param_groups[0]["lr"] = 0.2
    cluster = ServerCluster(workers=(ServerWorker(name="a"),))
    with pytest.raises(InvalidValue, match=r"optimizer must be new for training around a server, got .*SGD"):
        pipe.train_with_server(data(), way=cluster, global_batch=8, micro_batch=4)
    optimizer.param_groups[0]["lr"] = 0.1
    with pytest.raises(
        InvalidValue, match="resume must be the name of the run, for training around a server, got 'las"
    ):
        pipe.train_with_server(data(), way=cluster, global_batch=8, micro_batch=4, resume="last")
