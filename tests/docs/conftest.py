import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

MY_MODEL = """\
import torch
from torch.utils.data import TensorDataset


def make():
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32), torch.nn.ReLU(),
                               torch.nn.Linear(32, 10))


def inputs():
    return torch.randn(16, 64)


def data():
    return TensorDataset(torch.randn(256, 64), torch.randint(10, (256,)))
"""


@pytest.fixture(scope="session")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what pages take for granted: a model's module, its profile, a plan, losses of short runs."""
    from funcpipe import FuncPipe, Pins, write

    folder = tmp_path_factory.mktemp("planned")
    (folder / "my_model.py").write_text(MY_MODEL)
    names: dict[str, object] = {}
    exec(compile(MY_MODEL, "my_model.py", "exec"), names)
    make, inputs = names["make"], names["inputs"]
    assert callable(make)
    assert callable(inputs)
    pipe = FuncPipe(make(), loss_fn=torch.nn.functional.cross_entropy, optimizer=torch.optim.SGD)
    profile = pipe.profile(inputs(), platform="aws-lambda", micro_batch=16, repeats=2)
    plan = pipe.optimize(global_batch=128, replicas=[2], pins=Pins(cuts=(profile.layers[2].name,)))
    write(profile, folder / "profile.json")
    write(plan, folder / "plan.json")
    losses = (f"{step},{2 / step + 0.5}\n" for step in range(1, 200))
    (folder / "losses.csv").write_text("step,loss\n" + "".join(losses))
    return folder


@pytest.fixture
def folder(planned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of `planned` for one page, which is the current folder and the first in which modules are looked for."""
    shutil.copytree(planned, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FUNCPIPE_HISTORY", str(tmp_path / "history.jsonl"))
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if (tmp_path / f"{name}.py").exists():
            del sys.modules[name]
