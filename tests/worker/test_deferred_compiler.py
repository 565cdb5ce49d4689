"""Functions train without the compiler, which takes seconds to load, and have it when it is wanted; clients too.

Each program runs in a process of its own, forked from one that has imported torch and this module alone.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from funcpipe.model.graph import trace
from funcpipe.worker.deferred_compiler import OF_NUMBERS, CompilerDeferred, are_numbers, defer_compiler

COMPILER, ALGEBRA = "torch._dynamo.eval_frame", "sympy.core"
"""Modules that are loaded with the compiler, and with the algebra of shapes."""


def loaded() -> set[str]:
    return {COMPILER, ALGEBRA} & set(sys.modules)


def eager_code() -> None:
    """What functions do; what is decorated meanwhile is not compiled later, either."""
    defer_compiler()
    model = torch.nn.Linear(4, 3)
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop):
        take_step(model, kind)

    found: list[bool] = []

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def one(x: int | Tensor) -> int | Tensor:
        found.append(torch.compiler.is_compiling())
        return x + 1

    @torch.compiler.disable(recursive=False, reason="as packages say it")  # type: ignore[no-untyped-call, untyped-decorator]
    def two(x: int) -> int:
        return x + 2

    assert one(1) == 2
    assert two(1) == 3
    import sympy  # type: ignore[import-untyped]

    assert not loaded()
    assert sympy.__version__
    assert loaded() == {ALGEBRA}
    with pytest.raises(RuntimeError, match="Mismatch in shape"):
        torch.autograd.backward([model(torch.ones(2, 4))], [torch.ones(3, 2)])
    compiles()
    compiled = torch.compile(lambda x: one(x) * 2, backend="eager")
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 4.0))
    assert found == [False, False]
    take_step(model, torch.optim.SGD)


def take_step(model: nn.Module, kind: Callable[..., torch.optim.Optimizer]) -> None:
    optimizer = kind(model.parameters(), lr=0.1)
    before = [parameter.clone() for parameter in model.parameters()]
    output = model(torch.ones(2, 4))
    torch.autograd.backward([output], [torch.ones_like(output)])
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    assert not any(map(torch.equal, before, model.parameters())), kind


def compiles() -> None:
    double = torch.compile(lambda x: x * 2, backend="eager")
    assert torch.equal(double(torch.ones(3)), torch.full((3,), 2.0))
    assert loaded() == {COMPILER, ALGEBRA}
    from torch import _dynamo as compiler

    assert compiler is sys.modules["torch._dynamo"]
    assert compiler.config is sys.modules["torch._dynamo.config"]


def code_that_walks_all_modules() -> None:
    """As torch does while operators are defined, in the middle of imports that the compiler needs itself."""
    import inspect

    defer_compiler()
    inspect.getmodule(sys._getframe())
    assert not loaded()
    import torch.distributed.tensor  # noqa: F401


def user_program() -> str:
    """No verb loads the compiler; a context leaves nothing in a program that is not ours, whatever is imported in it.

    What models are traced to before the compiler is loaded, and afterwards.
    """
    plan()
    assert "torch._dynamo" not in sys.modules
    with CompilerDeferred():
        found = graphs(without="branches")
        assert loaded() == {ALGEBRA}
    leave_nothing()
    return found + "\n" + graphs()


def plan() -> None:
    """From the module to the plan a program steps an optimiser."""
    from funcpipe import FuncPipe

    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    pipe = FuncPipe(model, loss_fn=nn.functional.cross_entropy, optimizer=torch.optim.AdamW)
    pipe.profile(torch.zeros(4, 4), sample_target=torch.zeros(4, dtype=torch.long), micro_batch=4, repeats=1)
    pipe.optimize(global_batch=8)
    pipe.provision(64, global_batch=8, epochs=1, ways=["one-machine"])
    assert COMPILER not in loaded()


def leave_nothing() -> None:
    from types import ModuleType

    with CompilerDeferred():
        with CompilerDeferred():
            trace(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), (torch.ones(2, 4),))
        assert "torch._dynamo" in sys.modules
        take_step(nn.Linear(4, 3), torch.optim.Adam)
        assert COMPILER not in sys.modules
        kept = ModuleType("kept")
        exec("from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode as Kept", vars(kept))
    assert "torch._dynamo" not in sys.modules
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    assert kept.Kept is GuardOnDataDependentSymNode
    compiles()
    with CompilerDeferred():
        compiles()
    compiles()


class Attention(nn.Module):
    """Operators of many kinds, on shapes that follow from each other."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.norm, self.drop = nn.Linear(8, 24), nn.LayerNorm(8), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, 2, 4).transpose(1, 2) for part in self.project(x).split(width, dim=2)
        )
        weights = torch.softmax(query @ key.transpose(-2, -1) + torch.tril(torch.ones(length, length)).log(), -1)
        mixed = (weights @ value).transpose(1, 2).contiguous().view(batch, length, width)
        mixed = torch.where(mixed > 0, mixed, torch.zeros_like(mixed)).masked_fill(x.isnan(), 0.0)
        found: Tensor = self.norm(self.drop(mixed) + x)[:, ::2].flatten(1).amax(-1)
        return found


class Branches(nn.Module):
    """Code that the first two tracers refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y * 2 if y.sum() > 0 else y


MODELS: Mapping[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "convolutions": lambda: (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5)),
        torch.randn(3, 3, 8, 8),
    ),
    "attention": lambda: (Attention(), torch.randn(2, 6, 8)),
    "recurrent": lambda: (nn.LSTM(4, 8, batch_first=True), torch.randn(3, 5, 4)),
    "branches": lambda: (Branches(), torch.randn(3, 4)),
}


def graphs(*, without: str = "") -> str:
    """How each of the models is traced, and to what."""
    found = []
    for name, make in MODELS.items():
        if name != without:
            torch.manual_seed(0)
            model, sample = make()
            graph = trace(model, (sample,))
            attempts = [(attempt.tracer, attempt.failure) for attempt in graph.attempts]
            found.append(f"{name} {attempts} {[layer.name for layer in graph.layers]} {graph.module.graph}")
    return "\n".join(found)


def graphs_of_a_command() -> str:
    defer_compiler()
    with CompilerDeferred():
        found = graphs(without="branches")
        assert not loaded()
        return found


FORKS = """
import os, sys, traceback, json
import torch
import tests.worker.test_deferred_compiler as programs
found = {}
for name in sys.argv[1:]:
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.close(reads)
        code = 1
        try:
            said = getattr(programs, name)() or ""
            code = 0
        except BaseException:
            said = traceback.format_exc()[-4000:]
        with os.fdopen(writes, "w") as stream:
            stream.write(said)
        os._exit(code)
    os.close(writes)
    said = os.fdopen(reads).read()
    found[name] = (os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said)
print(json.dumps(found))
"""

pytestmark = pytest.mark.xdist_group("deferred compiler")  # one run of all programs is enough

PROGRAMS = ("eager_code", "code_that_walks_all_modules", "user_program", "graphs_of_a_command")


@pytest.fixture(scope="module")
def ended() -> Mapping[str, list[Any]]:
    """The exit code of each program, and what it said."""
    done = subprocess.run([sys.executable, "-c", FORKS, *PROGRAMS], check=True, capture_output=True, text=True)
    found: dict[str, list[Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_compiler_is_not_loaded_for_eager_code_and_is_there_when_it_is_wanted(
    program: str, ended: Mapping[str, list[Any]]
) -> None:
    code, said = ended[program]
    assert code == 0, said


def test_models_are_traced_to_the_same_graphs_without_the_compiler(ended: Mapping[str, list[Any]]) -> None:
    simple, all_of_them = graphs(without="branches"), graphs()
    assert simple.count("[('fx', None)]") == len(MODELS) - 1
    assert ended["graphs_of_a_command"] == [0, simple]
    assert ended["user_program"] == [0, f"{simple}\n{all_of_them}"]


NUMBERS = st.one_of(st.booleans(), st.integers(0, 3))
SIZES = st.tuples(st.integers(0, 2), st.integers(0, 2))
ARGUMENTS = {
    **dict.fromkeys(("guard_int", "optimization_hint"), st.tuples(st.integers())),
    **dict.fromkeys(
        ("guarding_hint_or_throw", "is_symbolic", "is_nested_int", "has_guarding_hint"), st.tuples(NUMBERS)
    ),
    **dict.fromkeys(("has_free_unbacked_symbols", "free_unbacked_symbols"), st.tuples(st.one_of(NUMBERS, SIZES))),
    **dict.fromkeys(("_iterate_exprs", "_iterate_nodes"), st.tuples(st.one_of(NUMBERS, SIZES))),
    **dict.fromkeys(("sym_and", "sym_or"), st.lists(st.booleans(), min_size=1).map(tuple)),
    "sym_eq": st.one_of(st.tuples(SIZES, SIZES), st.tuples(st.integers(0, 2), st.integers(0, 2))),
}


@pytest.mark.filterwarnings("ignore:guard_size_oblivious:FutureWarning")
@given(st.sampled_from(sorted(OF_NUMBERS)), st.data())
def test_of_numbers_the_algebra_of_shapes_says_the_same(name: str, data: st.DataObject) -> None:
    import torch.fx.experimental.symbolic_shapes as algebra

    arguments: tuple[Any, ...] = data.draw(ARGUMENTS.get(name, st.tuples(st.booleans())))
    assert all(map(are_numbers, arguments))
    found, expected = OF_NUMBERS[name](*arguments), getattr(algebra, name)(*arguments)
    if name.startswith("_iterate"):
        found, expected = list(found), list(expected)
    assert (type(found), found) == (type(expected), expected)


def test_symbols_are_no_numbers_wherever_they_are() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False)
    symbolic = mode.from_tensor(torch.ones(3, 4), symbolic_context=context)
    size = symbolic.shape[0]
    assert isinstance(size, torch.SymInt)
    assert not any(map(are_numbers, (size, size > 2, [1, size], symbolic, symbolic.shape, {"a": 1}, object())))
    assert not are_numbers(torch.ones(2, 2).to_sparse())
    assert are_numbers(FakeTensorMode().from_tensor(torch.ones(3, 4)))
