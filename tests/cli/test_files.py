"""The file that a trained model is written to."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from funcpipe.cli import main
from funcpipe.cli.files import (
    check_holds,
    check_model_file,
    free_model_file,
    write_file,
    write_model,
    write_somewhere,
)
from funcpipe.core import write
from funcpipe.errors import InputError
from tests.e2e import small


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(2, 3).T)  # not contiguous


class WithSettings(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: Any) -> None:
        self.version = state["version"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "model.pth"])
def test_a_model_is_read_back_from_its_file_with_tied_weights(name: str) -> None:
    model, fresh = Tied(), Tied()
    check_holds(name, model.state_dict())
    write_model(model.state_dict(), name)
    found = safetensors.torch.load_file(name) if name.endswith("safetensors") else torch.load(name)
    fresh.load_state_dict(found)
    assert all(torch.equal(tensor, fresh.state_dict()[key]) for key, tensor in model.state_dict().items())
    assert fresh.head.weight is fresh.embedding.weight
    assert [path.name for path in Path().iterdir()] == [name]


@pytest.mark.parametrize("name", ["model", "model.bin", "model.json", "m.safetensors.zip"])
def test_other_extensions_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=rf"{name} has no extension .* choose \.safetensors, or \.pt or \.pth"):
        check_model_file(name)


def test_what_safetensors_cannot_hold_is_told_before_training() -> None:
    with pytest.raises(InputError, match=r"cannot hold '_extra_state', a dict: .* use -o model\.pt"):
        check_holds("model.safetensors", WithSettings(2, 2).state_dict())
    with pytest.raises(InputError, match=r"cannot hold 'a', a torch\.complex128"):
        check_holds("model.safetensors", {"a": torch.zeros(1, dtype=torch.complex128)})
    check_holds("model.pt", WithSettings(2, 2).state_dict())


def test_an_existing_file_is_never_the_default() -> None:
    assert free_model_file() == "model.safetensors"
    Path("model.safetensors").touch()
    Path("model-2.safetensors").symlink_to("nowhere")
    assert free_model_file() == "model-3.safetensors"


def test_a_model_that_cannot_be_written_where_it_was_wanted_is_not_lost(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder / "temporary"))
    with pytest.raises(
        InputError, match=r"gone/model\.pt.* cannot be written: .*; the trained model is in .*run-1\.pt"
    ):
        write_somewhere({"weight": torch.ones(2)}, "gone/model.pt", "run-1")
    assert torch.equal(torch.load(folder / "temporary" / "run-1.pt")["weight"], torch.ones(2))


def test_a_model_is_kept_in_its_storage_exported_and_trained_on(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(small.plan(2, 1), "plan.json")
    words = ["train", "tests.e2e.small:model", "--data", "tests.e2e.small:data", "--plan", "plan.json"]
    assert main([*words, "--epochs", "2"]) == 0
    assert "model: model.safetensors" in capsys.readouterr().out
    where = ["--storage", f"file://{folder}/runs"]
    assert main([*words, *where, "--run", "kept"]) == 0
    shown = capsys.readouterr().out
    assert f"the model is kept in file://{folder}/runs" in shown
    assert f"funcpipe run export kept --storage file://{folder}/runs -o model.safetensors" in shown
    assert main(["status", "kept", *where]) == 0
    assert "and its model is kept (0.0 MB)" in capsys.readouterr().out
    assert main([*words, *where, "--resume", "kept", "--epochs", "2", "-o", "longer.pt"]) == 0
    assert main(["export", "kept", *where]) == 0
    assert "the model after step 32 of 32: model-2.safetensors" in capsys.readouterr().out.replace("\n", " ")
    at_once, longer = safetensors.torch.load_file("model.safetensors"), torch.load("longer.pt")
    exported = safetensors.torch.load_file("model-2.safetensors")
    assert at_once.keys() == longer.keys() == exported.keys()
    assert all(torch.equal(tensor, longer[name]) for name, tensor in at_once.items())
    assert all(torch.equal(tensor, exported[name]) for name, tensor in at_once.items())
    assert main(["export", "kept", *where, "--step", "7"]) == 2
    assert "must be a step that run kept has saved: 32" in capsys.readouterr().err.replace("\n", " ")
    assert main(["clean", "kept", *where]) == 0
    assert main(["export", "kept", *where]) == 2


@pytest.mark.parametrize(("mask", "mode"), [(0o027, 0o640), (0o002, 0o664)])
def test_files_have_the_permissions_that_the_user_s_files_have(mask: int, mode: int, tmp_path: Path) -> None:
    """Whatever writes them: safetensors writes for their owner alone."""
    before = os.umask(mask)
    try:
        for name in ("model.safetensors", "model.pt"):
            write_model({"weight": torch.ones(2)}, str(tmp_path / name))
        write_file(
            partial(safetensors.torch.save_file, {"output": torch.ones(2)}), str(tmp_path / "outputs.safetensors")
        )
        kept = tmp_path / "kept.safetensors"
        kept.touch()
        kept.chmod(0o600)
        write_model({"weight": torch.ones(2)}, str(kept))
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes.pop("kept.safetensors") == 0o600, "a file that is written again keeps its own"
    assert set(modes.values()) == {mode}
    assert len(modes) == 3


def test_nothing_is_left_of_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    def fail(error: BaseException, path: str) -> None:
        raise error

    for error, message in (
        (OSError("no space left"), "cannot be written: no space left"),
        (InputError("nothing to draw"), "^nothing to draw$"),
    ):
        with pytest.raises(InputError, match=message):
            write_file(partial(fail, error), str(tmp_path / "new"))
        assert list(tmp_path.iterdir()) == []
