"""A stage in another process, which has funcpipe but not the user's files."""

import importlib.util
import pickle
import subprocess
import sys
import textwrap
import threading
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

from funcpipe.errors import ModelError
from funcpipe.model.graph import trace
from funcpipe.model.split import dump_stage, load_stage, split
from funcpipe.model.split.bundle import dump_value, load_value
from tests.model.graph.models import CausalTransformer, ResidualNet
from tests.model.split.chain import assert_same, even_bounds, run_chain, take_gradients

USER_CODE = """
import torch
from torch import nn

SCALE = 3.0


def scaled(x):
    return SCALE * x


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x):
        return scaled(x) * self.by


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.scale = Scale()
        self.inner.register_forward_hook(lambda module, args, output: output + SCALE)

    def forward(self, x):
        return scaled(self.scale(self.inner(x)))


def loss(output, target):
    return scaled((output - target).square().mean())
"""

LOADER = """
import pickle, sys, torch
from funcpipe.model.split import load_stage

bundle, tensors, x = pickle.load(open(sys.argv[1], "rb"))
assert "user_code" not in sys.modules
stage, loss = load_stage(bundle, tensors)
_, output = stage({"x": x})
value = loss(output, torch.zeros(2, 3))
value.backward()
gradients = {name: parameter.grad for name, parameter in stage.named_parameters()}
pickle.dump((output.detach(), value.detach(), gradients, list(stage.state_dict())), open(sys.argv[2], "wb"))
"""


def user_code(folder: Path) -> ModuleType:
    (folder / "user_code.py").write_text(USER_CODE)
    spec = importlib.util.spec_from_file_location("user_code", folder / "user_code.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["user_code"] = module
    spec.loader.exec_module(module)
    return module


def test_a_bundle_loads_where_the_users_files_are_not(tmp_path: Path) -> None:
    users = user_code(tmp_path)
    try:
        model, x = users.Net(), torch.randn(2, 3)
        graph = trace(model, (x,))
        (stage,) = split(graph, [(0, len(graph.layers))])
        bundle, tensors = dump_stage(stage, users.loss)
        assert "user_code" not in cloudpickle.list_registry_pickle_by_value()  # which is this process's, for all
    finally:
        del sys.modules["user_code"]
    message, answer, script = tmp_path / "in", tmp_path / "out", tmp_path / "load.py"
    message.write_bytes(pickle.dumps((bundle, tensors, x)))
    script.write_text(textwrap.dedent(LOADER))
    (tmp_path / "user_code.py").unlink()
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-P", script, message, answer], check=True, env={"PYTHONPATH": str(root)}, cwd="/")
    output, value, gradients, names = pickle.loads(answer.read_bytes())  # noqa: S301 - written just now by our own child
    expected = model(x)
    users.loss(expected, torch.zeros(2, 3)).backward()
    assert torch.equal(output, expected)
    assert torch.equal(value, users.loss(expected, torch.zeros(2, 3)))
    assert_same(gradients, take_gradients(model))
    assert names == list(model.state_dict())


def test_a_users_module_that_took_the_name_of_an_installed_one_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = ModuleType("user_code")
    installed.__file__ = pytest.__file__
    monkeypatch.setitem(sys.modules, "user_code", installed)
    dump_value(1)
    bundle, tensors = dump_value(user_code(tmp_path).scaled)
    del sys.modules["user_code"]
    assert load_value(bundle, tensors)(2.0) == 6.0


def test_a_module_that_loads_a_library_when_it_is_asked_for_something_is_not_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pyomo leaves several, which loaded scipy.stats, pandas and matplotlib whenever a stage was pickled."""

    class Deferred(ModuleType):
        def __getattr__(self, name: str) -> object:
            asked.append(name)
            raise AttributeError(name)

    asked = list[str]()
    monkeypatch.setitem(sys.modules, "deferred", Deferred("deferred"))
    assert load_value(*dump_value({"a": 1})) == {"a": 1}
    assert asked == []


@pytest.mark.parametrize("model", [ResidualNet(), CausalTransformer()])
def test_bundles_hold_no_tensor_and_give_the_same_numbers(model: nn.Module) -> None:
    x = torch.randn(2, 1, 8, 8) if isinstance(model, ResidualNet) else torch.randint(0, 23, (2, 12))
    for parameter in model.parameters():
        parameter.data = parameter.data.repeat_interleave(1).view_as(parameter)
    graph = trace(model, (x,))
    pieces = split(graph, even_bounds(len(graph.layers), 3))
    loaded = []
    for piece in pieces:
        bundle, tensors = dump_stage(piece, {"epochs": 3})
        assert set(piece.state_dict()) <= {*tensors, *piece.shared, "output.weight"}
        raw = [tensor.numpy().tobytes()[:64] for tensor in tensors.values() if tensor.numel() > 16]
        assert not any(data in bundle for data in raw if len(set(data)) > 1)
        stage, extra = load_stage(bundle, {name: tensor.clone() for name, tensor in tensors.items()})
        assert extra == {"epochs": 3}
        assert_same(stage.state_dict(), piece.state_dict())
        assert stage.shared == piece.shared
        loaded.append(stage)
    inputs = graph.signature.bind((x,), {})
    first = run_chain(pieces, inputs, torch.sum, (1, 2, 3))
    assert torch.equal(run_chain(loaded, inputs, torch.sum, (1, 2, 3)), first)


def test_parametrised_modules_survive() -> None:
    """Weight normalisation and its like, which torch does not pickle."""
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
    model, x = nn.Sequential(normed, nn.Tanh(), nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))), torch.ones(2, 3)
    (stage,) = split(trace(nn.Linear(3, 4), (x,)), [(0, 1)])
    _, loaded = load_stage(*dump_stage(stage, model))
    expected, output = model(x), loaded(x)
    torch.autograd.backward([output.sum(), expected.sum()])
    assert torch.equal(output, expected)
    found = {name: parameter.grad for name, parameter in loaded.named_parameters()}
    assert found.keys() == dict(model.named_parameters()).keys()
    assert_same(found, take_gradients(model))


OWN = ContextVar[int]("own", default=3)


def test_hooks_that_use_context_variables_survive() -> None:
    """As `transformers` hangs them on its modules: nested functions, which travel by value with what they refer to."""
    model, x = nn.Linear(3, 4), torch.ones(2, 3)
    own = OWN

    def hook(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output * own.get()

    model.register_forward_hook(hook)
    (stage,) = split(trace(nn.Linear(3, 4), (x,)), [(0, 1)])
    _, loaded = load_stage(*dump_stage(stage, model))
    assert torch.equal(loaded(x), model(x))
    without_default = ContextVar[int]("unset")
    _, variables = load_stage(*dump_stage(stage, (without_default, OWN)))
    with pytest.raises(LookupError):
        variables[0].get()
    assert variables[1].get() == 3


def test_ties_and_layouts_survive() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Conv2d(3, 4, 2)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model[1].weight = model[0].weight
    model[1].bias = nn.Parameter(torch.zeros(4), requires_grad=False)

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: torch.Tensor) -> Any:
            first, second = self.parts.children()
            return first(x) + second(x)

    graph = trace(Sum(), (torch.randn(2, 3, 4, 4),))
    (stage,) = split(graph, [(0, 2)])
    bundle, tensors = dump_stage(stage, None)
    assert len(tensors) == 3
    loaded, _ = load_stage(bundle, {name: tensor.contiguous() for name, tensor in tensors.items()})
    first, second = (loaded.get_submodule(name) for name in ("parts.0", "parts.1"))
    assert first.weight is second.weight
    assert isinstance(first.weight, nn.Parameter)
    assert isinstance(first.bias, nn.Parameter)
    assert isinstance(second.bias, nn.Parameter)
    assert first.weight.stride() == model[0].weight.stride()
    assert first.bias.requires_grad
    assert not second.bias.requires_grad


def test_what_cannot_be_sent_is_named() -> None:
    model = nn.Linear(2, 2)
    (stage,) = split(trace(model, (torch.ones(1, 2),)), [(0, 1)])
    with pytest.raises(ModelError, match=r"cannot be sent to another process: TypeError: .*lock"):
        dump_stage(stage, threading.Lock())


OPERATOR = """
import torch


@torch.library.custom_op("funcpipe_tests::{name}", mutates_args=())
def {name}(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


torch.library.register_fake("funcpipe_tests::{name}", lambda x: torch.empty_like(x))
torch.library.register_autograd("funcpipe_tests::{name}", lambda context, gradient: 2 * gradient)
"""


class Doubling(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.packet = getattr(torch.ops.funcpipe_tests, name)
        self.twice = self.packet.default

    def forward(self, x: torch.Tensor) -> Any:
        return self.twice(self.packet(self.inner(x)))


def doubling(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A model that calls an operator which a module in `folder` makes."""
    folder.mkdir(exist_ok=True)
    (folder / f"operators_{name}.py").write_text(OPERATOR.format(name=name))
    monkeypatch.syspath_prepend(folder)
    importlib.import_module(f"operators_{name}")
    return Doubling(name)


def test_an_operator_of_an_installed_package_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = tmp_path / "libs" / "operators-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Name: operators\nVersion: 1.0\n")
    (metadata / "RECORD").write_text("operators_installed.py,,\n")
    model, x = doubling(tmp_path / "libs", "installed", monkeypatch), torch.randn(2, 3)
    (stage,) = split(trace(model, (x,)), [(0, 1)])
    bundle, tensors = dump_stage(stage, torch.nn.functional.mse_loss)
    message, answer, script = tmp_path / "in", tmp_path / "out", tmp_path / "load.py"
    message.write_bytes(pickle.dumps((bundle, tensors, x)))
    script.write_text(LOADER.replace("loss(output, ", "loss(output, target=").replace("user_code", "nothing"))
    paths = f"{Path(__file__).parents[3]}:{tmp_path / 'libs'}"
    subprocess.run([sys.executable, "-P", script, message, answer], check=True, env={"PYTHONPATH": paths})
    output, *_ = pickle.loads(answer.read_bytes())  # noqa: S301 - written just now by our own child
    assert torch.equal(output, 4 * model.get_submodule("inner")(x))


def test_an_operator_of_the_users_own_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = doubling(tmp_path / "mine", "own", monkeypatch)
    (stage,) = split(trace(model, (torch.randn(2, 3),)), [(0, 1)])
    with pytest.raises(ModelError, match="funcpipe_tests::own is defined in operators_own, which functions"):
        dump_stage(stage, None)
