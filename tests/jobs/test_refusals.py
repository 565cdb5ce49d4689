"""What is refused names what is wrong and a way out; the way out trains as a user's script does."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcpipe import FuncPipe
from funcpipe.errors import FuncPipeError, InputError, ModelError
from funcpipe.model.graph import trace
from tests.jobs.scripts import EQUAL, SGD, Script, job_of, run_over_functions, run_script, worst_difference


def tensors(*size: int, samples: int = 20) -> list[tuple[Any, ...]]:
    """Samples of random inputs of this size, and their classes."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(*size, generator=generator), torch.tensor(i % 3)) for i in range(samples)]


def ids(samples: int = 20) -> list[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(2)
    return [(torch.randint(0, 20, (6,), generator=generator), torch.tensor(i % 3)) for i in range(samples)]


def around(*parts: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), *parts, nn.Linear(8, 3))


def script_of(
    make: Callable[[], nn.Module], samples: Callable[[], Any] = lambda: tensors(8), loss: Any = F.cross_entropy
) -> Script:
    return Script(make=lambda: (make(), loss), samples=samples)


def refusal(script: Script, **options: Any) -> str:
    with pytest.raises(FuncPipeError) as caught:
        run_over_functions(script, **options)
    return str(caught.value)


def assert_equal(script: Script, **options: Any) -> None:
    found = run_over_functions(script, **options)
    difference, name = worst_difference(script, found, run_script(script)[0])
    assert difference < EQUAL, name


# Embeddings that rewrite their weight


class Language(nn.Module):
    def __init__(self, max_norm: float | None = None, *, bag: bool = False) -> None:
        super().__init__()
        self.embed = (nn.EmbeddingBag if bag else nn.Embedding)(20, 8, max_norm=max_norm)
        self.body = around(nn.Tanh(), nn.Linear(8, 8))
        self.bag = bag

    def forward(self, x: Tensor) -> Any:
        x = self.rows(x)
        return self.body(x if self.bag else x.mean(1))

    def rows(self, x: Tensor) -> Any:
        return self.embed(x)


class Functional(Language):
    def rows(self, x: Tensor) -> Any:
        return F.embedding(x, self.embed.weight, max_norm=1.5)


class Scaled(Language):
    """The way out for an Embedding."""

    def rows(self, x: Tensor) -> Any:
        rows = self.embed(x)
        return rows * (1.5 / rows.norm(2.0, -1, keepdim=True).clamp(min=1.5))


class Renormed(Language):
    """The way out for F.embedding, and for an EmbeddingBag."""

    def rows(self, x: Tensor) -> Any:
        embedding = F.embedding_bag if self.bag else F.embedding
        return embedding(x, self.embed.weight.renorm(2, 0, 1.5))


@pytest.mark.parametrize("max_norm", [1.5, 100.0])
def test_an_embedding_with_max_norm_is_named_also_before_any_row_is_long_enough(max_norm: float) -> None:
    said = refusal(script_of(lambda: Language(max_norm), ids))
    assert said.startswith(f"embed (Embedding) has max_norm={max_norm}, so that each forward rewrites rows")
    assert f"rows * ({max_norm} / rows.norm(2.0, -1, keepdim=True).clamp(min={max_norm}))" in said
    said = refusal(script_of(lambda: Language(max_norm, bag=True), ids))
    assert f"call F.embedding_bag with weight.renorm(2.0, 0, {max_norm})" in said


def test_a_call_with_max_norm_is_named_and_the_model_is_not_changed() -> None:
    model = Functional()
    before = model.embed.weight.clone()
    with pytest.raises(
        ModelError, match=r"`return F.embedding\(x, self.embed.weight, max_norm=1.5\)` is given max_nor"
    ):
        trace(model, (torch.randint(0, 20, (4, 6)),))
    assert torch.equal(model.embed.weight, before)


@pytest.mark.parametrize("make", [Scaled, Renormed, lambda: Renormed(bag=True)])
def test_ways_out_of_max_norm_train(make: Callable[[], nn.Module]) -> None:
    assert_equal(script_of(make, ids), stages=3, replicas=2)


# Buffers that are assigned


class Norm(nn.Module):
    """BatchNorm by hand, with buffers that it assigns."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - x.mean(0)


class OwnBuffer(nn.Module):
    """The model's own code assigns a buffer."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = around(nn.Tanh(), nn.Linear(8, 8))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Any:
        self.remember(0.9 * self.mean + 0.1 * x.mean(0))
        return self.layers(x)

    def remember(self, mean: Tensor) -> None:
        self.mean = mean


class InPlace(OwnBuffer):
    def remember(self, mean: Tensor) -> None:
        self.mean.copy_(mean)


def test_modules_that_assign_buffers_become_blocks_by_themselves() -> None:
    graph = trace(around(*(part for _ in range(4) for part in (Norm(), nn.Linear(8, 8)))), (torch.randn(4, 8),))
    assert len(graph.layers) == 10
    assert graph.blocks == ("1", "3", "5", "7")
    assert graph.notes[0].startswith("kept as one block each: 1, 3, 5, 7: 1 (Norm) assigns the buffer mean (")
    assert "`self.mean = 0.9 * self.mean" in graph.notes[0]


def test_modules_that_assign_buffers_train_over_several_stages() -> None:
    script = Script(
        make=lambda: (around(Norm(), nn.Linear(8, 8), Norm()), F.cross_entropy),
        samples=lambda: tensors(8),
        micro_batch=8,
        global_batch=8,
        epochs=2,
    )
    assert_equal(script, stages=3)


def test_a_model_that_assigns_its_own_buffer_is_told_to_write_into_it() -> None:
    (_, note) = trace(OwnBuffer(), (torch.randn(4, 8),)).notes
    assert note.startswith("OwnBuffer is one layer: OwnBuffer assigns the buffer mean (")
    assert "self.mean.copy_(…), can be recorded" in note
    assert len(trace(InPlace(), (torch.randn(4, 8),)).layers) == 4


# TorchScript


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning")
def test_torch_script_is_refused_with_its_place_and_the_way_out_has_its_weights() -> None:
    made = around(nn.Tanh())
    scripted, traced = torch.jit.script(made), torch.jit.trace(nn.Linear(8, 8), torch.randn(2, 8))  # type: ignore[no-untyped-call]
    for field, model, loss in (
        ("model", scripted, F.cross_entropy),
        ("model.1", around(traced), F.cross_entropy),
        ("loss_fn", made, torch.jit.script(nn.CrossEntropyLoss())),
        ("loss_fn", made, torch.jit.script(_loss)),
    ):
        with pytest.raises(InputError, match=f"^{field} must not be TorchScript.*Give what torch.jit.script or"):
            FuncPipe(model, loss_fn=loss, optimizer=SGD)
    way_out = around(nn.Tanh())
    way_out.load_state_dict(scripted.state_dict())
    x = torch.randn(4, 8)
    assert torch.equal(FuncPipe(way_out, loss_fn=_loss, optimizer=SGD).model(x), scripted(x))


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


# Global variables

STEP = 0
SEEN: list[int] = []
COUNTS = {"steps": 0}
AUXILIARY: Tensor | None = None
TABLES: dict[int, Tensor] = {}
WARNED = False


class Settings:
    """An object that counts, and a class that does."""

    steps = 0

    def __init__(self) -> None:
        self.mine = 0


SETTINGS = Settings()


def bump() -> int:
    global STEP
    STEP += 1  # line of a function
    return STEP


class Layer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)


class Called(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x)) if bump() > 100 else super().forward(x)


class Appends(Layer):
    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(1)
        return super().forward(x) / len(SEEN)


class Counts(Layer):
    def forward(self, x: Tensor) -> Tensor:
        COUNTS["steps"] += 1
        return super().forward(x)


class CountsInObject(Layer):
    def forward(self, x: Tensor) -> Tensor:
        SETTINGS.mine += 1
        return super().forward(x)


class CountsInClass(Layer):
    def forward(self, x: Tensor) -> Tensor:
        Settings.steps += 1
        return super().forward(x)


class CountsInDefault(Layer):
    def forward(self, x: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006 - as users do
        seen.append(1)
        return super().forward(x) / len(seen)


class Leaves(Layer):
    def forward(self, x: Tensor) -> Tensor:
        global AUXILIARY
        AUXILIARY = super().forward(x)
        return torch.tanh(AUXILIARY)


class FillsOnce(Layer):
    def forward(self, x: Tensor) -> Tensor:
        global WARNED
        WARNED = True
        if x.shape[1] not in TABLES:
            TABLES[x.shape[1]] = torch.arange(8.0)
        return super().forward(x) + TABLES[x.shape[1]]


class CountsItself(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        return torch.tanh(super().forward(x)) if self.step > 2 else super().forward(x)


@pytest.mark.parametrize(
    ("part", "named"),
    [
        (Called, r"the global variable STEP of \S+ \(1 \(Called\), .*: `STEP \+= 1  # line of a function`\)"),
        (Appends, r"the global variable SEEN of \S+ \(1 \(Appends\), .*: `SEEN.append\(1\)`\)"),
        (Counts, r"the global variable COUNTS of .*self\.counts, set in __init__"),
        (CountsInObject, r"the global variable SETTINGS of .*`SETTINGS.mine \+= 1`"),
        (CountsInClass, r"the global variable steps of \S+\.Settings .*`Settings.steps \+= 1`"),
        (CountsInDefault, r"a default value or an enclosed variable of CountsInDefault.forward .*`seen.append\(1\)`"),
    ],
)
def test_a_global_variable_that_each_forward_changes_is_named_with_its_line(part: type[nn.Module], named: str) -> None:
    with pytest.raises(ModelError, match=rf"^each forward changes {named}"):
        trace(around(part()), (torch.randn(4, 8),))


def test_a_tensor_left_in_a_global_variable_is_refused() -> None:
    with pytest.raises(
        ModelError, match=r"autograd history in the global variable AUXILIARY of .* return it as a part"
    ):
        trace(around(Leaves()), (torch.randn(4, 8),))


def test_what_is_filled_once_is_no_concern() -> None:
    TABLES.clear()
    graph = trace(around(FillsOnce()), (torch.randn(4, 8),))
    assert [layer.name for layer in graph.layers] == ["0", "1", "2"]


def test_the_way_out_of_a_counter_trains() -> None:
    script = Script(
        make=lambda: (around(CountsItself()), F.cross_entropy),
        samples=lambda: tensors(8),
        micro_batch=8,
        global_batch=8,
        epochs=2,
    )
    assert_equal(script, stages=3)


def test_what_counts_forwards_is_said_to_count_micro_batches(caplog: pytest.LogCaptureFixture) -> None:
    """A script on whole batches counts those."""
    whole = replace(script_of(lambda: around(CountsItself())), micro_batch=16)
    job_of(whole)
    assert "counts micro-batches" not in caplog.text
    job_of(replace(whole, micro_batch=4))
    assert "leaves 1.step for the next one, and a global batch takes 4 forwards, where a script" in caplog.text


# Samples unlike the first ones


def test_notes_are_told_once_per_session(caplog: pytest.LogCaptureFixture) -> None:
    pipe = FuncPipe(around(Norm()), loss_fn=F.cross_entropy, optimizer=SGD)
    for _ in range(2):
        pipe.profile(torch.randn(4, 8), platform="local", micro_batch=4, repeats=1)
    assert sum("assigns the buffer" in record.getMessage() for record in caplog.records) == 1
