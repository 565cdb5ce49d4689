"""The model's own train() and eval() decide which modules are in which mode, as in a user's script."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcpipe.errors import ModelError
from funcpipe.model.graph import trace
from funcpipe.model.graph.modes import evaluation_mode, training_mode
from funcpipe.model.split import split
from funcpipe.training.evaluation import StageEvaluation, evaluating
from tests.jobs.scripts import EQUAL, Script, run_over_functions, run_script, worst_difference

SAMPLES = 22


class Normed(nn.Module):
    """A stem and a body with BatchNorm. The body is in blocks that data does not change; with `whole`, it is."""

    def __init__(self, *, whole: bool = False) -> None:
        super().__init__()
        self.whole = whole
        self.stem: Any = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.body: Any = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if self.whole and float(x.detach().sum()) > 1e9:  # a choice by data, which no graph can hold
            x = -x
        for block in self.body:
            x = x + block(x)
        output: Tensor = self.head(x)
        return output


class FrozenStem(Normed):
    """Its stem is in eval mode, whatever train() says."""

    def train(self, mode: bool = True) -> "FrozenStem":
        super().train(mode)
        self.stem.eval()
        return self


class ReturnsNothing(Normed):
    """A train() that returns None, and leaves modules in eval mode."""

    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        super().train(mode)
        self.body[0][1].training = False


class WithoutArgument(Normed):
    """A train() that takes no mode, and an eval() of its own."""

    def train(self) -> None:  # type: ignore[override]
        self._switch(True)

    def eval(self) -> None:  # type: ignore[override]
        self._switch(False)

    def _switch(self, mode: bool) -> None:
        for module in self.modules():
            module.training = mode
        self.stem[1].training = False


class Freezes(Normed):
    """A train() that also freezes parameters, as those of detectors do."""

    def train(self, mode: bool = True) -> "Freezes":
        super().train(mode)
        self.stem.eval().requires_grad_(False)
        return self


class Stem(nn.Module):
    """A part of a model with a train() of its own, which sets an attribute that its forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.factor = 1.0

    def train(self, mode: bool = True) -> "Stem":
        super().train(mode)
        self.norm.eval()
        self.factor = 0.5 if mode else 1.0
        return self

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.norm(self.linear(x)) * self.factor
        return output


class WithPart(Normed):
    def __init__(self, *, whole: bool = False) -> None:
        super().__init__(whole=whole)
        self.stem = Stem()


def vectors() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, generator=generator).double(), torch.tensor(i % 3)) for i in range(SAMPLES)]


def script(make: Callable[[], Any]) -> Script:
    """In batches that are not cut, as BatchNorm in the body is not linear."""
    return Script(
        make=lambda: (make().double(), F.cross_entropy), samples=vectors, micro_batch=16, global_batch=16, epochs=2
    )


MODELS: tuple[type[Normed], ...] = (FrozenStem, ReturnsNothing, WithoutArgument, Freezes, WithPart)


def left_in_eval(kind: type[Normed]) -> Callable[[], Any]:
    def make() -> Any:
        model = kind()
        for module in model.modules():
            module.training = False
        return model

    return make


@pytest.mark.parametrize("kind", MODELS)
def test_the_own_train_of_a_model_is_called(kind: type[Normed]) -> None:
    one = script(kind)
    difference, name = worst_difference(one, run_over_functions(one, stages=3), run_script(one)[0])
    assert difference < EQUAL, name


@pytest.mark.parametrize("kind", [WithoutArgument, WithPart])
def test_so_it_is_for_a_model_that_is_in_eval_mode(kind: type[Normed]) -> None:
    one = script(left_in_eval(kind))
    difference, name = worst_difference(one, run_over_functions(one), run_script(one)[0])
    assert difference < EQUAL, name


@pytest.mark.parametrize("kind", [FrozenStem, WithoutArgument, WithPart])
def test_so_it_is_for_a_model_that_runs_as_a_whole(kind: type[Normed]) -> None:
    one = script(lambda: kind(whole=True))
    difference, name = worst_difference(one, run_over_functions(one, stages=1), run_script(one)[0])
    assert difference < EQUAL, name


def test_what_the_user_has_put_in_eval_mode_stays_there() -> None:
    def make() -> nn.Module:
        model = Normed()
        model.body[1].eval()
        return model

    one = script(make)
    expected = script(left_alone(make))
    difference, name = worst_difference(one, run_over_functions(one), run_script(expected)[0])
    assert difference < EQUAL, name


def left_alone(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The same model, whose modes train() does not change."""

    def made() -> nn.Module:
        model = make().double()
        vars(model)["train"] = lambda mode=True: model
        return model

    return made


def modes_of(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


@pytest.mark.parametrize("in_training", [True, False])
def test_modes_are_restored(in_training: bool) -> None:
    model = WithPart() if in_training else left_in_eval(WithPart)()
    model.body[0].train(not in_training)
    before = modes_of(model)
    with training_mode(model):
        assert modes_of(model) != before
        assert model.training
        assert not model.stem.norm.training
        assert model.body[0].training is not in_training
    with evaluation_mode(model):
        assert not any(modes_of(model).values())
        assert model.stem.factor == 1.0
    assert modes_of(model) == before
    assert model.stem.factor == 0.5  # as train() has set it


def test_a_model_in_eval_mode_is_told() -> None:
    sample = (torch.randn(4, 8),)
    assert any("eval mode" in note for note in trace(Normed().eval(), sample).notes)
    assert not any("eval mode" in note for note in trace(Normed(), sample).notes)
    assert not any("eval mode" in note for note in trace(Normed().eval(), sample, training=False).notes)


class KeepsOn(Normed):
    """Its eval() leaves a part in training mode."""

    def train(self, mode: bool = True) -> "KeepsOn":
        super().train(mode)
        self.body[0][2].training = True
        return self


@pytest.mark.parametrize("whole", [False, True])
def test_evaluation_has_the_modes_of_the_own_eval(whole: bool) -> None:
    model = KeepsOn(whole=whole)
    graphs = [trace(model, (torch.randn(4, 8),), training=training) for training in (True, False)]
    training, evaluation = (split(graph, [(0, len(graph.layers))])[0] for graph in graphs)
    with evaluating(cast(StageEvaluation, SimpleNamespace(stage=evaluation, loss=None)), training):
        assert {name for name, module in evaluation.named_modules() if name and module.training} == {"body.0.2"}
    assert all(module.training for module in training.modules())


class Counts(Normed):
    epochs = 0

    def train(self, mode: bool = True) -> "Counts":
        self.epochs += mode
        return super().train(mode)


class Merges(Normed):
    """Adds to its weights in eval mode, and takes that off in training mode, as adapters do."""

    merged = False

    def train(self, mode: bool = True) -> "Merges":
        if self.merged is mode:
            self.head.weight.data.add_(-1.0 if mode else 1.0)
            self.merged = not mode
        return super().train(mode)


class Fails(Normed):
    def train(self, mode: bool = True) -> "Fails":
        raise ValueError("not today")


class SetsOthers(Normed):
    """Its eval() sets an attribute of a part, which has no eval() of its own."""

    def train(self, mode: bool = True) -> "SetsOthers":
        super().train(mode)
        self.stem.factor = 0.5 if mode else 1.0
        return self


@pytest.mark.parametrize(
    ("kind", "training", "text"),
    [
        (Counts, True, r"train\(\) of Counts changes epochs each time .*scheduler"),
        (Merges, False, r"eval\(\) of Merges changes the values of head\.weight.*call it before"),
        (SetsOthers, False, r"eval\(\) of SetsOthers sets stem\.factor.*in a train\(\) of the class"),
        (Fails, True, r"train\(\) of the model fails: .*not today"),
        (Fails, False, r"eval\(\) of the model fails: .*not today"),
    ],
)
def test_modes_that_functions_cannot_repeat_are_refused(kind: type[Normed], training: bool, text: str) -> None:
    model = kind()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ModelError, match=text):
        trace(model, (torch.randn(4, 8),), training=training)
    assert all(torch.allclose(tensor, before[name], atol=1e-6) for name, tensor in model.state_dict().items())
    assert getattr(model, "epochs", 0) == 0


def test_weights_that_are_merged_already_are_evaluated() -> None:
    model = Merges().eval()
    assert trace(model, (torch.randn(4, 8),), training=False).layers
