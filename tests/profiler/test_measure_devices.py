"""What a layer keeps where a GPU has other operators than a processor."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from funcpipe.model.graph import trace
from funcpipe.platforms.catalog import load_spec
from funcpipe.profiler.profile import profile


class Attention(nn.Module):
    """Attention with dropout over so many positions, of one head, without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        return found


def kept(model: nn.Module, x: Tensor) -> list[tuple[int, int]]:
    """What each layer keeps, on a processor and on a GPU."""
    found = profile(trace(model, (x,)), (x,), spec=load_spec("local"), micro_batch=len(x), repeats=0)
    return [(layer.activation_bytes, layer.kept_on_device_bytes) for layer in found.layers]


def test_dropout_keeps_a_byte_for_each_element_instead_of_a_number() -> None:
    """By hand: 6 elements; the first dropout reads the model's input, which needs no gradient."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    assert kept(model, torch.ones(2, 3)) == [(24, 24), (24, 6)]
    assert kept(model.eval(), torch.ones(2, 3)) == [(24, 24), (0, 0)]


def test_attention_with_dropout_keeps_no_probabilities() -> None:
    """By hand: 8 positions of 4 numbers, which attention reads, so they count with it, and makes, of 128 bytes; and the
    logarithm of a sum for each position.
    """
    model = nn.Sequential(nn.Linear(4, 4), Attention())
    (_, _), (on_host, on_device) = kept(model, torch.ones(1, 1, 8, 4))
    assert on_device == 2 * 128 + 8 * 4
    assert on_host > on_device + 2 * 8 * 8 * 4


def test_the_last_layer_keeps_what_the_loss_keeps() -> None:
    """By hand: the logarithms of probabilities, 5 for each of 2 samples, and the targets, and the sum of weights."""
    model, targets = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 5)), torch.tensor([0, 1])
    x = torch.ones(2, 3)
    found = [
        profile(trace(model, (x,)), (x,), spec=load_spec("local"), micro_batch=2, repeats=0, loss=loss)
        for loss in (None, lambda output: F.cross_entropy(output, targets))
    ]
    without, with_loss = (one.layers[-1].activation_bytes for one in found)
    assert with_loss - without == 5 * 2 * 4 + 2 * 8 + 4
