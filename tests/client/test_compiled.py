"""Stages run eagerly: `compile=True` and what torch.compile has wrapped are refused, with figures and the way out."""

import contextlib
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from funcpipe import FuncPipe, InputError
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.platforms.catalog import load_spec
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform
from tests.e2e import small

optimizer = partial(torch.optim.SGD, lr=0.1)
EAGER = "functions run stages eagerly, as they have no C\\+\\+ compiler"


def wrapped(value: Any) -> Any:
    return torch.compile(value, backend="eager")  # wraps as the default does, which takes long to load


def decorated() -> nn.Module:
    """A layer that compiles its own forward."""

    class Decorated(nn.Linear):
        forward = wrapped(nn.Linear.forward)

    return Decorated(4, 3)


def disabled() -> nn.Module:
    """A layer that keeps its forward out of whatever is compiled around it."""

    class Disabled(nn.Linear):
        forward = torch.compiler.disable(nn.Linear.forward)  # type: ignore[no-untyped-call]

    return Disabled(4, 3)


def pipe(model: nn.Module, **options: Any) -> FuncPipe:
    given: dict[str, Any] = {"loss_fn": F.cross_entropy, "optimizer": optimizer, **options}
    return FuncPipe(model, **given)


def called() -> nn.Module:
    model = small.model()
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize("value", [True, "inductor", {"mode": "max-autotune"}])
def test_compiled_stages_are_refused_with_what_was_measured(value: object) -> None:
    with pytest.raises(InputError, match=rf"^compile must be left out: {EAGER}.*\d+ to \d+ s.*, got ") as caught:
        pipe(small.model(), compile=value)
    assert str(caught.value).endswith(f"got {value!r}")


def test_eager_is_the_default() -> None:
    model = small.model()
    assert pipe(model).model is pipe(model, compile=False).model is model


@pytest.mark.parametrize(
    ("model", "field", "how"),
    [
        (lambda: wrapped(small.model()), "model", r"torch.compile\(module\)"),
        (lambda: nn.Sequential(nn.Linear(4, 4), wrapped(nn.Linear(4, 3))), "model.1", r"torch.compile\(module\)"),
        (called, "model", r"module.compile\(\)"),
        (lambda: nn.Sequential(decorated()), "model.0", "@torch.compile of its forward"),
    ],
    ids=["wrapped", "wrapped inside", "compile()", "decorated"],
)
def test_a_compiled_model_is_refused_with_the_place(model: Any, field: str, how: str) -> None:
    with pytest.raises(InputError, match=rf"^{field} must not be compiled: {EAGER}.*_orig_mod.*, got '{how}'"):
        pipe(model())


@pytest.mark.parametrize("loss", [F.cross_entropy, nn.CrossEntropyLoss()], ids=["function", "module"])
def test_a_compiled_loss_is_refused(loss: Any) -> None:
    with pytest.raises(InputError, match=f"^loss_fn must not be compiled: {EAGER}"):
        pipe(small.model(), loss_fn=wrapped(loss))


def test_the_way_out_trains_the_weights_of_the_compiled_model(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemoryStorage()
    functions = ThreadPlatform(load_spec("local"), storage)
    session = session_on(Site(functions, storage, "memory://"), reopen=functions.open)
    monkeypatch.setattr("funcpipe.api.training.open_session", lambda *_, **__: contextlib.nullcontext(session))
    model: Any = small.model()
    compiled = wrapped(model)
    before = model[0].weight.clone()
    result = pipe(compiled._orig_mod).train(small.data, plan=small.plan(), progress=False)
    assert not torch.equal(compiled._orig_mod[0].weight, before)
    assert torch.equal(compiled.state_dict()["_orig_mod.0.weight"], result.state_dict()["0.weight"])


def test_code_that_must_not_be_compiled_is_no_reason_to_refuse() -> None:
    model = nn.Sequential(disabled())
    assert pipe(model).model is model
