"""The loss and metrics of a validation: parts, however the data is dealt, combine to what one pass would measure."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from funcpipe.errors import DataError, InvalidValue
from funcpipe.training.evaluation import Scores
from funcpipe.training.metrics import Part, is_torchmetric, made_metrics
from tests.examples import at_most

if TYPE_CHECKING:
    import torchmetrics

CLASSES = 3


@cache
def metrics() -> dict[str, Callable[[], Any]]:
    """Metrics whose states are summed, put side by side, and a matrix; loaded where they are used, as it takes long."""
    from torchmetrics import classification

    return {
        "sum": lambda: classification.MulticlassAccuracy(CLASSES, average="macro"),
        "cat": lambda: classification.MulticlassAUROC(CLASSES),
        "confusion": lambda: classification.MulticlassMatthewsCorrCoef(CLASSES),
    }


@cache
def largest() -> "type[torchmetrics.Metric]":
    """A metric: the largest, the smallest and the mean of the outputs, reduced by max, min and mean."""
    from torchmetrics import Metric

    class Largest(Metric):
        most: Tensor
        least: Tensor
        level: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.add_state("most", torch.tensor(-1e9), dist_reduce_fx="max")
            self.add_state("least", torch.tensor(1e9), dist_reduce_fx="min")
            self.add_state("level", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="mean")

        def update(self, output: Tensor, target: Tensor) -> None:
            """Add a batch."""
            self.most = torch.maximum(self.most, output.max())
            self.least = torch.minimum(self.least, output.min())
            self.level = ((self._update_count - 1) * self.level + output.double().mean()) / self._update_count

        def compute(self) -> Tensor:
            """One number of all three."""
            return self.most - 2 * self.least + self.level

    return Largest


def batches(count: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    sizes = [1 + i % 4 for i in range(count)]
    return [
        (torch.randn(size, CLASSES, generator=draw), torch.randint(0, CLASSES, (size,), generator=draw))
        for size in sizes
    ]


def parts_of(scores: Scores, dealt: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> list[Part]:
    parts = []
    for own in dealt:
        scores.begin()
        for output, target in own:
            scores.add(output, target, len(target))
        parts.append(scores.part())
    return parts


def error(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) != target).double().mean()


def no_metric() -> dict[str, int]:
    return {"a": 1}


@at_most(8)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(0, 5))
def test_parts_combine_to_one_pass_however_batches_are_dealt(owners: list[int], seed: int) -> None:
    data = [*batches(12, seed), *batches(len(owners), seed + 1)]
    owner = [*range(4), *[0] * 8, *owners]
    dealt = [[one for one, own in zip(data, owner, strict=True) if own == part] for part in (*range(4), 4)]
    given_metrics = {name: make() for name, make in metrics().items()}
    scores = Scores(nn.functional.cross_entropy, {**given_metrics, "extremes": largest(), "error": error})
    samples, values = scores.values(parts_of(scores, dealt), loss="val_loss")
    outputs, targets = torch.cat([o for o, _ in data]), torch.cat([t for _, t in data])
    assert samples == len(targets)
    assert values["val_loss"] == pytest.approx(nn.functional.cross_entropy(outputs, targets).item(), rel=1e-5)
    assert values["error"] == pytest.approx(error(outputs, targets).item(), abs=1e-12)
    for name, metric in given_metrics.items():
        for output, target in data:
            metric.update(output, target)
        assert values[name] == pytest.approx(float(metric.compute()), abs=1e-6)
    extremes = largest()()
    for output, target in data:
        extremes.update(output, target)
    assert values["extremes"] == pytest.approx(float(extremes.compute()), abs=1e-6)


def test_a_state_without_a_reduction_is_stacked_as_its_metric_expects() -> None:
    from torchmetrics.regression import PearsonCorrCoef

    draw = torch.Generator().manual_seed(3)
    data = [(torch.randn(6, generator=draw), torch.randn(6, generator=draw)) for _ in range(5)]
    scores = Scores(None, {"pearson": PearsonCorrCoef})
    _, values = scores.values(parts_of(scores, [data[:2], data[2:3], data[3:]]), loss="loss")
    metric = PearsonCorrCoef()
    for output, target in data:
        metric.update(output, target)
    assert values == {"pearson": pytest.approx(float(metric.compute()), abs=1e-5)}


def test_metrics_are_torchmetrics_factories_of_them_or_functions_and_the_users_are_left_alone() -> None:
    from torchmetrics.classification import MulticlassAccuracy

    given_one = MulticlassAccuracy(CLASSES)
    made = made_metrics({"one": given_one, "made": metrics()["sum"], "class": largest(), "function": error})
    assert [is_torchmetric(metric) for metric in made.values()] == [True, True, True, False]
    assert made["one"] is not given_one
    scores = Scores(None, {"one": given_one})
    parts_of(scores, [batches(2)])
    assert given_one._update_count == 0


@pytest.mark.parametrize(
    ("given_ones", "why"),
    [
        ({"a": 3}, "must be a metric of torchmetrics or evaluate, a factory of one, or a function"),
        ({"a": no_metric}, "must make a metric of torchmetrics or evaluate where it takes no arguments, got {"),
        ({"a/b": error}, "must be names without slashes"),
    ],
)
def test_what_is_no_metric_is_refused(given_ones: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidValue, match=why):
        made_metrics(given_ones)


def test_a_metric_that_keeps_its_state_in_another_one_is_refused() -> None:
    from torchmetrics import MinMaxMetric

    with pytest.raises(InvalidValue, match="must keep its state in itself"):
        made_metrics({"a": MinMaxMetric(largest()())})


def test_a_loss_or_metric_that_is_not_one_number_is_refused() -> None:
    from torchmetrics.classification import MulticlassAccuracy

    output, target = batches(2)[1]
    with pytest.raises(DataError, match=r"the loss function must give one number.*shape \(2,\)"):
        Scores(lambda o, t: nn.functional.cross_entropy(o, t, reduction="none"), {}).add(output, target, 2)
    with pytest.raises(DataError, match="the metric x must give one number"):
        Scores(None, {"x": lambda o, t: {"a": 1}}).add(output, target, 2)
    each = Scores(None, {"x": MulticlassAccuracy(CLASSES, average=None)})
    with pytest.raises(DataError, match=r"the metric x must give one number.*shape \(3,\)"):
        each.values(parts_of(each, [batches(3)]), loss="loss")
