"""A client of a model by its weights reads nothing of what was learned before it is asked for, a file at a time."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

from funcpipe.api import FuncPipe
from funcpipe.cli import main
from funcpipe.core import StoredFile, Validation
from funcpipe.errors import ModelError
from funcpipe.runstate.checkpoints import Checkpoints
from funcpipe.training.state import StageState
from tests.e2e.plans import even_plan
from tests.e2e.test_weights import SAMPLE, Model, data, loss, optimizer, plan, write

RUN = "opened"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files of checkpoints that this process reads."""
    files: list[str] = []
    own = Checkpoints._tensors

    def counted(self: Checkpoints, stage: int, file: StoredFile) -> dict[str, Tensor]:
        files.append(file.name)
        return own(self, stage, file)

    monkeypatch.setattr(Checkpoints, "_tensors", counted)
    return files


def made() -> Model:
    torch.manual_seed(1)
    return Model()


def by_weights(tmp_path: Path) -> FuncPipe:
    return FuncPipe(Model, loss_fn=loss, optimizer=optimizer, weights=write(made(), tmp_path / "weights"))


def train(pipe: FuncPipe, chosen: Any, storage: str | None = None, *, epochs: int = 2, **options: Any) -> Any:
    return pipe.train(data(), epochs=epochs, plan=chosen, storage=storage, **options)


def set_from(model: Model, state: dict[str, Any]) -> torch.optim.Optimizer:
    """An optimiser as torch's own function makes it of a state."""
    given = optimizer(model.parameters())
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    set_optimizer_state_dict(model, given, state, options=options)
    return given


def plain(tree: Any) -> Any:
    """The same with lists in place of tensors and tuples."""
    if isinstance(tree, Mapping):
        return {key: plain(item) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        return [plain(item) for item in tree]
    return tree.tolist() if isinstance(tree, Tensor) else tree


@pytest.mark.parametrize("is_sharded", [False, True])
def test_it_is_read_when_it_is_asked_for(tmp_path: Path, read: list[str], *, is_sharded: bool) -> None:
    model = made()
    chosen = even_plan(model, SAMPLE, stages=1 if is_sharded else 2, replicas=2, micro_batch=2, micro_batches=2)
    chosen = replace(chosen, shard_optimizer=is_sharded)
    storage = (tmp_path / "runs").as_uri()
    found = train(by_weights(tmp_path), chosen, storage, run=RUN, validation=Validation(data=data()[:4]))
    assert read == []
    own = optimizer(model.parameters())
    expected = train(FuncPipe(model, loss_fn=loss, optimizer=own), chosen, validation=Validation(data=data()[:4]))
    assert found.losses == expected.losses
    for mine, others in (
        (found.state_dict(), expected.state_dict()),
        (found.best_state_dict(), expected.best_state_dict()),
        (found.optimizer_state_dict(), expected.optimizer_state_dict()),
    ):
        assert plain(mine) == plain(others)
    again = set_from(model, dict(found.optimizer_state_dict()))
    assert plain(again.state_dict()) == plain(own.state_dict()), "torch's own optimiser has been left the same"

    folder = tmp_path / "optimizer"
    command = ["run", "export", RUN, "--storage", storage, "--optimizer", "-o"]
    assert main([*command, str(folder)]) == 0
    written = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    again = set_from(model, written | json.loads((folder / "optimizer.json").read_text()))
    assert plain(again.state_dict()) == plain(own.state_dict())
    assert main([*command, "optimizer.pt"]) == 2


def test_a_run_is_resumed_from_what_is_only_opened(tmp_path: Path, read: list[str]) -> None:
    pipe, chosen, storage = by_weights(tmp_path), plan(made()), (tmp_path / "runs").as_uri()
    whole = train(pipe, chosen)
    read.clear()
    train(pipe, chosen, storage, epochs=1, run=RUN)
    found = train(pipe, chosen, storage, resume=RUN)
    assert found.losses == whole.losses
    assert plain(found.state_dict()) == plain(whole.state_dict())


def test_what_has_no_flat_form_is_refused() -> None:
    settings = {
        "optimizer": {"state": {"w": {"dict": {"old": {"list": [{"tensor": "a"}, {"tensor": "b"}]}}}}, "groups": []}
    }
    tensors = {"a": torch.zeros(1), "b": torch.ones(1)}
    state = StageState(tensors=tensors, aliases={}, transient=frozenset(), settings=settings)
    with pytest.raises(ModelError, match=r"several tensors as .old. of state\.w"):
        state.optimizer_state_dict()
