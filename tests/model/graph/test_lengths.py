"""Lengths and batch sizes other than the sample's: what is computed equals the model's, or is refused."""

import copy
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcpipe.errors import DataError, ModelError
from funcpipe.model.graph import LayerGraph, trace
from funcpipe.model.graph.equivalence import check_batch_sizes
from tests.model.graph.check import check, compare_with_model
from tests.model.graph.models import CausalTransformer, ResidualNet


def agrees(model: nn.Module, graph: LayerGraph, *args: Any) -> bool:
    """Return whether the stages of `graph` take `args`; if so, check that they compute what the model does."""
    try:
        compare_with_model(copy.deepcopy(model), model, graph, (args, {}))
    except DataError:
        return False
    return True


def words(batch: int, length: int) -> Tensor:
    return torch.arange(batch * length).view(batch, length) * 7 % 23


def images(batch: int, height: int, width: int) -> Tensor:
    return torch.sin(torch.arange(float(batch * height * width))).view(batch, 1, height, width)


def test_a_transformer_takes_any_length_and_any_batch_size() -> None:
    model = CausalTransformer(depth=1)
    graph = trace(model, (words(4, 12),))
    assert graph.tracer == "fx"
    assert all(agrees(model, graph, words(batch, 5)) for batch in (1, 2, 4, 9))
    assert all(agrees(model, graph, words(2, length)) for length in (1, 2, 7, 11, 12))


def test_images_may_have_other_sizes() -> None:
    model = ResidualNet(blocks=1)
    graph = trace(model, (images(4, 12, 12),))
    assert all(agrees(model, graph, images(2, height, width)) for height, width in ((12, 12), (9, 9), (8, 15), (5, 4)))


class Positions(nn.Module):
    """Positions made as long as the input, a mask of its size, a mean over its length."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(23, 8)
        self.positions = nn.Embedding(40, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Any:
        length = ids.size(1)
        x = self.words(ids) + self.positions(torch.arange(length, device=ids.device))
        mask = torch.full((length, length), -math.inf).triu(1)
        x = self.mix((x @ x.transpose(1, 2) / length**0.5 + mask).softmax(-1) @ x)
        return self.head(x.sum(1) / ids.shape[1]), x.shape[1]


class PositionsForPeople(Positions):
    """The same, of which fx can make no graph."""

    def forward(self, ids: Tensor) -> Any:
        if not isinstance(ids, Tensor):
            raise TypeError("a tensor is wanted")
        return super().forward(ids)


@pytest.mark.parametrize(("kind", "tracer"), [(Positions, "fx"), (PositionsForPeople, "export")])
def test_what_is_made_for_a_length_follows_it(kind: type[nn.Module], tracer: str) -> None:
    model = kind()
    graph = trace(model, (words(4, 10),))
    assert graph.tracer == tracer
    assert all(
        agrees(model, graph, words(batch, length)) for batch, length in ((1, 2), (3, 7), (6, 10), (2, 11), (5, 30))
    )
    assert not [value for value in graph.values if value.scalar]  # every stage computes lengths for itself


class Sizes(nn.Module):
    """Two layers, and between them a choice that the subclass makes from sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.b(self.between(self.a(x)))

    def between(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Threshold(Sizes):
    def between(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[1] > 8 else x * 3


class BatchThreshold(Sizes):
    def between(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 4 else x * 3


class AtMostSeven(Sizes):
    def between(self, x: Tensor) -> Tensor:
        return x / min(x.shape[1], 7)


class HalfTheBatch(Sizes):
    def between(self, x: Tensor) -> Tensor:
        return x * (x.shape[0] // 2)


class HalfTheBatchInALoop(Sizes):
    def between(self, x: Tensor) -> Tensor:
        for _ in range(len(x[: x.shape[0] // 2])):
            x = x * 2
        return x


class FirstOfTheChunks(Sizes):
    def between(self, x: Tensor) -> Tensor:
        parts = torch.split(x, 4, 1)
        return torch.cat([part * i for i, part in enumerate(parts)], 1)


class Steps(Sizes):
    def between(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        for step in x.unbind(1):
            state = state * 0.5 + step
        return state


class Pooled(Sizes):
    def between(self, x: Tensor) -> Tensor:
        y = F.avg_pool1d(x.transpose(1, 2), 2, ceil_mode=True).transpose(1, 2)
        return y.repeat_interleave(2, 1)[:, : x.size(1)] / y.size(1)


class Flattened(Sizes):
    def between(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 4)
        return (flat / flat.shape[0]).view(x.shape)


class Squeezed(Sizes):
    def between(self, x: Tensor) -> Tensor:
        y = x.squeeze()
        return x * y.dim() + len(y.shape)


CHOICES = [Threshold, BatchThreshold, AtMostSeven, HalfTheBatch, HalfTheBatchInALoop]
FREE = [HalfTheBatch, Pooled, Flattened]
OTHERS = [FirstOfTheChunks, Steps, Pooled, Flattened, Squeezed]


def hidden_from_fx(kind: type[Sizes]) -> type[Sizes]:
    class Hidden(kind):  # type: ignore[misc, valid-type]
        def between(self, x: Tensor) -> Any:
            if not isinstance(x, Tensor):
                raise TypeError("a tensor is wanted")
            return super().between(x)

    return Hidden


def ways() -> Iterator[Any]:
    """Models to trace, by fx or hidden from it, at two lengths: two of each four, and all in the long run."""
    for kind in [*CHOICES, *OTHERS]:
        for hide, length in itertools.product((False, True), (9, 12)):
            marks = [] if hide == (length == 12) else [pytest.mark.long]
            yield pytest.param(kind, hide, length, marks=marks)


@pytest.mark.parametrize(("kind", "hide", "length"), [*ways()])
def test_what_code_makes_of_sizes_is_right_or_refused(kind: type[Sizes], hide: bool, length: int) -> None:
    torch.manual_seed(0)
    model = hidden_from_fx(kind)() if hide else kind()
    graph = trace(model, (torch.randn(3, length, 4),))
    assert graph.tracer in (("export", "eager") if hide else ("fx", "export", "eager"))
    taken = [(batch, length) for batch in range(1, 10) if agrees(model, graph, torch.randn(batch, length, 4))]
    taken += [(3, other) for other in (2, 5, 7, 8, 11, 14) if agrees(model, graph, torch.randn(3, other, 4))]
    assert (3, length) in taken
    if kind in FREE and not hide:
        assert len(taken) == 15


def test_refusals_name_the_line_and_a_way_out_that_works() -> None:
    model = nn.Sequential(nn.Linear(4, 4), BatchThreshold())
    graph = trace(model, (torch.randn(3, 9, 4),))
    with pytest.raises(DataError) as caught:
        compare_with_model(copy.deepcopy(model), model, graph, ((torch.randn(6, 9, 4),), {}))
    text = str(caught.value)
    assert re.search(r"^1, .*test_lengths.py:\d+: `return x \* 2 if x.shape\[0\] > 4 else x \* 3`", text)
    assert "was traced for False, but got True" in text
    assert 'blocks=["1"]' in text
    assert agrees(model, trace(model, (torch.randn(3, 9, 4),), blocks=("1",)), torch.randn(6, 9, 4))


def test_inputs_of_other_types_and_dimensions_are_refused() -> None:
    signature = trace(Pooled(), (torch.randn(3, 9, 4),)).signature
    for other, reason in (
        (torch.randn(3, 9, 4).double(), "was torch.float32 when the model was traced, but is torch.float64 now"),
        (torch.randn(3, 9), "must have 3 dimensions"),
    ):
        with pytest.raises(DataError, match=reason):
            signature.bind((other,), {})


def test_batch_sizes_of_a_run_are_tried_before_it() -> None:
    model = BatchThreshold()
    inputs = {"x": torch.randn(3, 9, 4)}
    graph = trace(model, (inputs["x"],))
    check_batch_sizes(graph, model, inputs, {1, 2, 3, 4})
    with pytest.raises(DataError, match="was traced for False, but got True"):
        check_batch_sizes(graph, model, inputs, {3, 8})


class EagerThreshold(BatchThreshold):
    """Chooses by a number that only the eager tracer takes."""

    def between(self, x: Tensor) -> Tensor:
        return x * 2 if len(list(np.zeros(x.shape[0]))) > 4 else x * 3


def test_what_the_eager_tracer_does_not_see_is_refused_before_the_run() -> None:
    model = EagerThreshold()
    inputs = {"x": torch.randn(3, 9, 4)}
    graph = trace(model, (inputs["x"],))
    assert graph.tracer == "eager"
    check_batch_sizes(graph, model, inputs, {4})
    with pytest.raises(
        ModelError, match=r"traced with batches of 1, 2 and 3, but it does something else for batches of 8"
    ):
        check_batch_sizes(graph, model, inputs, {8})


class Upsamples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(2, 3, 3, stride=2, padding=1)
        self.further_down = nn.Conv2d(3, 3, 3, stride=2, padding=1)
        self.head = nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Any:
        x = self.down(x)
        return self.head(x + F.interpolate(self.further_down(x), size=x.shape[2:], mode="bilinear"))


def test_sizes_of_another_tensor_follow_it() -> None:
    graph = check(Upsamples(), (torch.randn(3, 2, 9, 11),), others=(torch.randn(2, 2, 8, 8), torch.randn(1, 2, 16, 9)))
    assert (graph.tracer, len(graph.layers)) == ("fx", 3)
