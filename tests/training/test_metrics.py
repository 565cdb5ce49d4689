"""What metrics of libraries are given of outputs and targets, and what they may return."""

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from funcpipe.errors import DataError, InvalidValue
from funcpipe.training.evaluation import Scores

LOGITS = torch.tensor([[0.1, 0.9, 0.0], [0.7, 0.2, 0.1], [0.2, 0.3, 0.5], [0.6, 0.3, 0.1]])
TARGET = torch.tensor([1, 0, 2, 2])


COMPARED: list[dict[str, Any]] = []
"""What metrics of evaluate's kind have compared."""


class Kept:
    """A metric of evaluate's kind that notes what it compares, and returns `found`. As there, it holds locks then."""

    def __init__(self, found: Any = 0.5) -> None:
        self.found = found
        self.lock: Any = None

    def add_batch(self, *, predictions: Any, references: Any) -> None:
        raise AssertionError

    def compute(self, **given: Any) -> Any:
        self.lock = threading.RLock()
        COMPARED.append({name: value.tolist() for name, value in given.items()})
        return self.found


def value_of(metric: Any, *batches: tuple[Any, Any], name: str = "accuracy") -> float:
    """What the metric finds over batches, each of which is a part."""
    scores, parts = Scores(None, {name: metric}), []
    for output, target in batches:
        scores.begin()
        scores.add(output, target, 1)
        parts.append(scores.part())
    return scores.values(parts, loss="loss")[1][name]


@pytest.mark.parametrize(
    "output",
    [
        LOGITS,
        {"loss": torch.tensor(1.0), "logits": LOGITS, "states": [torch.zeros(4, 2)]},
        SimpleNamespace(loss=None, logits=LOGITS),
        {"loss": torch.tensor(1.0), "scores": LOGITS},
        (LOGITS,),
    ],
    ids=["tensor", "mapping", "object", "only tensor", "tuple"],
)
def test_libraries_compare_logits_and_functions_see_the_whole_output(output: Any) -> None:
    from torchmetrics.classification import MulticlassAccuracy

    assert value_of(MulticlassAccuracy(3, average="micro"), (output, TARGET)) == 0.75
    kept = Kept({"accuracy": np.float32(0.75)})
    assert value_of(kept, (output, TARGET), (output, TARGET)) == 0.75
    assert kept.lock is None
    assert COMPARED[-1] == {"predictions": [1, 0, 2, 0] * 2, "references": [1, 0, 2, 2] * 2}
    seen = []

    def share(one: Any, other: Any) -> float:
        seen.append(one)
        return 0.25

    assert value_of(share, (output, TARGET)) == 0.25
    assert seen[0] is output


def test_a_torchmetric_of_the_users_sees_the_whole_output() -> None:
    from torchmetrics import MeanMetric

    class Logits(MeanMetric):
        def update(self, output: Any, target: Tensor) -> None:  # type: ignore[override]
            super().update(output["logits"][:, 0])

    assert value_of(Logits(), ({"logits": LOGITS}, TARGET)) == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("output", "target", "given"),
    [
        (
            torch.stack([LOGITS[:2], LOGITS[2:]]),  # a class for each token; of those with -100, none
            torch.tensor([[1, -100], [2, 2]]),
            ([1, 2, 0], [1, 2, 2]),
        ),
        (LOGITS.T[None, :, :, None], TARGET[None, :, None], ([1, 0, 2, 0], [1, 0, 2, 2])),  # classes come second
        (torch.tensor([[0.5], [1.5]]).bfloat16(), torch.tensor([1.0, 2.0]), ([0.5, 1.5], [1.0, 2.0])),
        (torch.tensor([2, 0]), torch.tensor([2, 1]), ([2, 0], [2, 1])),
    ],
    ids=["tokens", "pixels", "numbers", "classes"],
)
def test_predictions_have_the_form_of_the_targets(output: Tensor, target: Tensor, given: Any) -> None:
    assert value_of(Kept(), (output, target)) == 0.5
    assert COMPARED[-1] == dict(zip(("predictions", "references"), given, strict=True))


@pytest.mark.parametrize(
    ("metric", "output", "target", "why"),
    [
        (Kept(), LOGITS[:, :1], TARGET, "accuracy compares classes, and the output has one number for each sample: ab"),
        (
            Kept(),
            {"a": LOGITS, "b": LOGITS},
            TARGET,
            "compares a tensor with a tensor, and the output is a dict and the",
        ),
        (
            Kept(),
            LOGITS,
            None,
            "the output is a Tensor and the target a NoneType; give a function of both that returns",
        ),
        (Kept({"f1": 0.1, "recall": 0.2}), LOGITS, TARGET, "gives 'f1', 'recall': call it by the name of one of them"),
        (Kept("much"), LOGITS, TARGET, "the metric accuracy must give one number, .* but gives a str"),
    ],
)
def test_what_cannot_be_compared_is_refused(metric: Any, output: Any, target: Any, why: str) -> None:
    with pytest.raises(DataError, match=why):
        value_of(metric, (output, target))


def test_one_of_several_values_is_chosen_by_name_and_factories_are_called() -> None:
    both = {"f1": 0.1, "recall": 0.2}
    assert value_of(lambda: Kept(both), (LOGITS, TARGET), name="recall") == 0.2
    with pytest.raises(
        InvalidValue, match="must make a metric of torchmetrics or evaluate where it takes no arguments"
    ):
        Scores(None, {"recall": lambda: both})


def test_a_metric_that_was_used_is_made_by_a_factory() -> None:
    used = Kept()
    used.compute()
    with pytest.raises(
        InvalidValue, match=r"cannot be copied \(TypeError: cannot pickle .* give a factory that makes it"
    ):
        Scores(None, {"accuracy": used})
