"""Samples that hold a model's arguments by name, with labels among them or the target beside them: trained, measured by
metrics of every kind, and ended by one of them, as tuples are.
"""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from funcpipe.client.follow.results import RunResult
from funcpipe.client.prepare.job import Learner, SampleOrder, make_job
from funcpipe.core import RunSettings, Validation
from funcpipe.platforms.catalog import load_spec
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform
from funcpipe.training.losses import loss_of_output
from funcpipe.training.recipe import Recipe
from tests.client.validated import run
from tests.e2e.plans import even_plan, momentum

CLASSES = 3


class Classifier(nn.Module):
    """As models of Hugging Face are: the loss is in the output where labels are among the arguments."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.last = nn.Linear(4, 8).double(), nn.Linear(8, CLASSES).double()

    def forward(self, x: Tensor, mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.last(torch.tanh(self.first(x * mask)))
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


def samples(count: int, seed: int) -> list[tuple[Tensor, Tensor, int]]:
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, 4, generator=draw).double()
    return [(row, (row > -1).double(), int(row.argmax()) % CLASSES) for row in rows]


TRAIN, HELD_OUT = samples(16, 1), samples(14, 2)


def inside(x: Tensor, mask: Tensor, target: int) -> Any:
    return {"x": x, "mask": mask, "labels": target}


def beside(x: Tensor, mask: Tensor, target: int) -> Any:
    return {"mask": mask, "x": x}, target


def positional(x: Tensor, mask: Tensor, target: int) -> Any:
    return x, mask, target


def loss_of_logits(output: Mapping[str, Tensor], target: Tensor) -> Tensor:
    return F.cross_entropy(output["logits"], target)


def share_right(output: Mapping[str, Tensor], target: Tensor) -> Tensor:
    return (output["logits"].argmax(1) == target).double().mean()


class Accuracy:
    """A metric as Hugging Face's evaluate loads them, and as strict: all classes at once, by keyword."""

    def add_batch(self, *, predictions: Any, references: Any) -> None:
        raise AssertionError("batches of several functions are not added up here")

    def compute(self, *, predictions: Any, references: Any) -> dict[str, float]:
        assert predictions.dtype == references.dtype == "int64"
        assert predictions.ndim == references.ndim == 1
        return {"accuracy": float((predictions == references).mean())}


def trained(form: Any, metrics: Mapping[str, Any], **validation: Any) -> RunResult:
    """What a run of two stages and two replicas leaves whose samples have this form."""
    model = Classifier()
    train, held_out = ([form(*sample) for sample in some] for some in (TRAIN, HELD_OUT))
    sample = torch.zeros(2, 4).double()
    plan = even_plan(model, (sample, sample), stages=2, replicas=2, micro_batch=2, micro_batches=2)
    recipe = Recipe(loss=loss_of_output if form is inside else loss_of_logits, optimizer=momentum)
    job = make_job(
        Learner(model=model, recipe=recipe),
        train,
        plan,
        SampleOrder(epochs=2),
        RunSettings(),
        Validation(data=held_out, every_steps=1, metrics=metrics, mode="max", **validation),
    )
    storage = MemoryStorage()
    return run(job, storage, ThreadPlatform(load_spec("local"), storage))


def test_all_forms_train_alike_and_every_kind_of_metric_sees_the_labels() -> None:
    from torchmetrics.classification import MulticlassAccuracy

    library = MulticlassAccuracy(CLASSES, average="micro")
    metrics = {"library": library, "accuracy": Accuracy(), "function": share_right}
    results = [trained(form, metrics, monitor="accuracy") for form in (inside, beside, positional)]
    x, mask, target = (torch.stack([torch.as_tensor(part) for part in parts]) for parts in zip(*HELD_OUT, strict=True))
    plain = Classifier()
    plain.load_state_dict(results[0].state_dict())
    right = (plain(x, mask)["logits"].argmax(1) == target).double().mean().item()
    assert 1 / CLASSES < right < 1
    for result in results:
        assert result.losses == pytest.approx(results[2].losses, abs=1e-12)
        for name, tensor in result.state_dict().items():
            torch.testing.assert_close(tensor, results[2].state_dict()[name], rtol=0, atol=1e-12)
        last = dict(result.validations[-1].values)
        assert last.pop("val_loss") == pytest.approx(F.cross_entropy(plain(x, mask)["logits"], target).item(), abs=1e-9)
        assert last == pytest.approx(dict.fromkeys(metrics, right), abs=1e-6)
        assert result.best_step == max(result.validations, key=lambda report: report.values["function"]).step


@pytest.mark.parametrize("form", [inside, beside])
def test_accuracy_ends_the_run_early(form: Any) -> None:
    result = trained(form, {"accuracy": Accuracy()}, monitor="accuracy", patience=2, min_delta=1.0)
    assert [report.stop for report in result.validations] == [False, False, True]
    assert len(result.losses) == 3
