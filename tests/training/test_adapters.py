"""What users leave out or pass in another form."""

import pickle
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import optim

from funcpipe.core import OptimizerKind
from funcpipe.errors import DataError
from funcpipe.training.data_source import DatasetFactory, call_arguments
from funcpipe.training.losses import LossWithTarget, loss_of_output
from funcpipe.training.recipe_trial import optimizer_kind

X = torch.ones(2)


def test_inputs_are_passed_by_position_or_by_name() -> None:
    assert call_arguments(X) == ((X,), {})
    assert call_arguments((X, 3)) == ((X, 3), {})
    assert call_arguments({"x": X}) == ((), {"x": X})


def test_a_module_may_compute_its_own_loss_as_an_attribute_or_an_item() -> None:
    assert loss_of_output(SimpleNamespace(loss=X), None) is X
    assert loss_of_output({"loss": X}, None) is X
    for output in (X, {"logits": X}, SimpleNamespace(loss=3.0)):
        with pytest.raises(DataError, match=f"the module's output, a {type(output).__name__}, holds no loss"):
            loss_of_output(output, None)


def test_a_loss_with_its_target_and_a_dataset_can_be_sent_to_functions() -> None:
    loss = pickle.loads(pickle.dumps(LossWithTarget(F.mse_loss, torch.zeros(2))))  # noqa: S301 - our own bytes
    assert loss(X) == 1.0
    assert pickle.loads(pickle.dumps(DatasetFactory([1, 2])))() == [1, 2]  # noqa: S301 - our own bytes


@pytest.mark.parametrize(
    ("factory", "kind"),
    [
        (partial(optim.SGD, lr=0.1), OptimizerKind.SGD),
        (partial(optim.SGD, lr=0.1, momentum=0.9), OptimizerKind.MOMENTUM),
        (optim.Adam, OptimizerKind.ADAM),
    ],
)
def test_the_kind_of_an_optimiser_follows_from_what_it_keeps(
    factory: partial[optim.Optimizer], kind: OptimizerKind
) -> None:
    assert optimizer_kind(factory) is kind
