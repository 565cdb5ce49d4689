"""Hooks of parameters run once a step on the gradient of the global batch, as in a user's script, or are refused."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import prune

from funcpipe.core import Wire
from funcpipe.errors import ModelError, PlanError
from tests.jobs.scripts import EQUAL, Script, job_of, run_over_functions, run_script, worst_difference

WORDS, LENGTH, SAMPLES = 20, 6, 22  # the last global batch has 6 samples, its last micro-batch 2


class Language(nn.Module):
    """Words in, words out; `tied` is embedding and head in one, which stages share."""

    def __init__(self, *, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 12)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(12, WORDS)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        output: Tensor = self.head(x)
        return output


def sentences() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [(ids, ids.roll(1)) for ids in torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=generator)]


def word_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


Register = Callable[[Any], None]


def script(register: Register, *, tied: bool = False, **changes: Any) -> Script:
    def make() -> tuple[nn.Module, Any]:
        model = Language(tied=tied).double()
        register(model)
        return model, word_loss

    return Script(make=make, samples=sentences, epochs=2, **changes)


def assert_equal(one: Script, **way: Any) -> None:
    difference, name = worst_difference(one, run_over_functions(one, **way), run_script(one)[0])
    assert difference < EQUAL, name


def masks_rows(model: Any) -> None:
    mask = torch.ones(WORDS, 1, dtype=torch.float64)
    mask[:7] = 0
    model.embed.weight.register_hook(lambda gradient: gradient * mask)


def clamps_all(model: Any) -> None:
    """Not linear: of parts of the gradient it makes something else than of their sum."""
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-2e-3, 2e-3))


def several_in_order(model: Any) -> None:
    weight = model.blocks[0][0].weight
    weight.register_hook(lambda gradient: gradient + 0.01)
    weight.register_hook(lambda gradient: None)
    weight.register_hook(lambda gradient: -2.0 * gradient)
    weight.register_hook(lambda gradient: gradient.clamp(max=0.0))
    model.head.bias.register_hook(functools.partial(torch.mul, 3.0))
    model.head.bias.register_hook(torch.sign)


class Halved:
    """A hook that is an object."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, gradient: Tensor) -> Tensor:
        return gradient * self.factor


def sparse_weights(model: Any) -> None:
    """The hook reads the parameter that it belongs to, as pruned weights that stay pruned do."""
    weight = model.blocks[1][0].weight
    with torch.no_grad():
        weight[:, ::2] = 0
    weight.register_hook(lambda gradient: gradient * (weight != 0))
    model.embed.weight.register_hook(Halved(0.5))


def frozen(model: Any) -> None:
    weight: Any = model.blocks[1][0].weight
    seen: list[Tensor] = []
    weight.register_hook(seen.append)
    weight.requires_grad_(False)


@pytest.mark.parametrize("register", [masks_rows, clamps_all, several_in_order, sparse_weights, frozen])
def test_hooks_run_on_the_gradient_of_the_global_batch(register: Register) -> None:
    assert_equal(script(register), stages=3, replicas=2)


@pytest.mark.parametrize(("stages", "replicas"), [(1, 1), (2, 1), (3, 2)])
def test_a_hook_of_a_tied_parameter_runs_on_the_sum_of_all_uses(stages: int, replicas: int) -> None:
    def register(model: Any) -> None:
        model.head.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))

    assert_equal(script(register, tied=True), stages=stages, replicas=replicas)


class Undivided(Language):
    """It chooses by data, which no graph can hold, and so runs as a whole."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids if int(ids.sum()) >= 0 else -ids)


def test_hooks_of_a_model_that_runs_as_a_whole() -> None:
    def make() -> tuple[nn.Module, Any]:
        model = Undivided().double()
        clamps_all(model)
        return model, word_loss

    assert_equal(Script(make=make, samples=sentences), stages=1, replicas=2)


class Clipping(torch.optim.SGD):
    """The script's optimiser, which clips the norm first; over functions `clip_grad_norm` does."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.02)
        return super().step(closure)


@pytest.mark.parametrize(("stages", "replicas"), [(2, 1), (3, 2)])
def test_hooks_run_before_the_norm_is_measured(stages: int, replicas: int) -> None:
    expected = run_script(script(clamps_all, tied=True, optimizer=functools.partial(Clipping, lr=0.5)))[0]
    sgd = functools.partial(torch.optim.SGD, lr=0.5)
    clipped = script(clamps_all, tied=True, optimizer=sgd, recipe={"clip_grad_norm": 0.02})
    difference, name = worst_difference(
        clipped, run_over_functions(clipped, stages=stages, replicas=replicas), expected
    )
    assert difference < EQUAL, name


class Rotating(nn.Module):
    """A complex parameter between real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.phase = nn.Parameter(torch.randn(6, dtype=torch.complex64))
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(torch.view_as_real(self.first(x) * self.phase).sum(-1).tanh())
        return output


def test_a_hook_gets_a_complex_gradient() -> None:
    def make() -> tuple[nn.Module, Any]:
        model: Any = Rotating()
        model.phase.register_hook(lambda gradient: gradient.conj() * 1j)
        return model, F.cross_entropy

    generator = torch.Generator().manual_seed(1)
    samples = [(torch.randn(6, generator=generator), torch.tensor(i % 3)) for i in range(SAMPLES)]
    assert_equal(Script(make=make, samples=lambda: samples), replicas=2)


class Rooted(Language):
    """The gradient of `scale` is NaN where it is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.0, 0.5]))

    def forward(self, ids: Tensor) -> Tensor:
        roots = torch.where(self.scale > 0, self.scale.sqrt(), 0.0)
        return super().forward(ids) * (1 + roots.sum())


def test_a_hook_that_removes_nan_trains_on() -> None:
    def make() -> tuple[nn.Module, Any]:
        model: Any = Rooted()
        model.scale.register_hook(torch.nan_to_num)
        return model, word_loss

    assert_equal(Script(make=make, samples=sentences), stages=2, replicas=2)


def test_noise_of_a_hook_is_the_same_on_all_replicas_and_copies() -> None:
    def register(model: Any) -> None:
        model.head.weight.register_hook(lambda gradient: gradient + torch.randn_like(gradient))

    one = script(register, tied=True)
    found = run_over_functions(one, stages=1)
    again = run_over_functions(one, stages=3, replicas=2)
    assert max(float((again[name] - found[name]).abs().max()) for name in found) < 1e-9


def test_the_model_and_what_its_hooks_hold_stay_as_they_are() -> None:
    made: list[Any] = []

    def register(model: Any) -> None:
        masks_rows(model)
        made.append(model)

    run_over_functions(script(register))
    model = made[-1]
    assert len(model.embed.weight._backward_hooks) == 1
    words = torch.zeros(1, 2, dtype=torch.int64)
    torch.autograd.backward(word_loss(model(words), words))
    assert not model.embed.weight.grad[:7].any()


calls = 0


def counts(gradient: Tensor) -> Tensor:
    global calls
    calls += 1
    return gradient / calls


class Decaying:
    """A hook that halves its factor with each call."""

    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, gradient: Tensor) -> Tensor:
        self.factor /= 2
        return gradient * self.factor


def fills(model: Any) -> None:
    model.embed.weight.register_hook([].append)


def fills_in_closure(model: Any) -> None:
    norms: list[float] = []
    model.embed.weight.register_hook(lambda gradient: norms.append(float(gradient.norm())))


def own_generator(model: Any) -> None:
    draw = torch.Generator().manual_seed(0)
    model.embed.weight.register_hook(lambda g: g + torch.randn(g.shape, generator=draw, dtype=g.dtype))


def reads_module(model: Any) -> None:
    model.embed.weight.register_hook(lambda gradient: gradient * model.head.bias.mean())


def reads_parameter(model: Any) -> None:
    bias = model.head.bias
    model.embed.weight.register_hook(lambda gradient: gradient * bias.mean())


def steps(model: Any) -> None:
    weight = model.embed.weight

    def step(gradient: Tensor) -> None:
        weight.data.sub_(gradient, alpha=0.1)

    weight.register_hook(step)


def reads_grad(model: Any) -> None:
    weight = model.embed.weight
    weight.register_hook(lambda gradient: gradient if weight.grad is None else gradient + weight.grad)


def accumulated(model: Any) -> None:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))


def other_shape(model: Any) -> None:
    model.embed.weight.register_hook(lambda gradient: gradient[0])


def fails(model: Any) -> None:
    model.embed.weight.register_hook(lambda gradient: gradient.no_such_thing)


HOOK, CHANGES = r"hook of embed\.weight ", "changes what it reaches"
REFUSED: tuple[tuple[Register, str], ...] = (
    (fills, f"{HOOK}.*{CHANGES}, __self__"),
    (fills_in_closure, f"{HOOK}.*{CHANGES}.*norms"),
    (lambda model: model.embed.weight.register_hook(counts), f"{HOOK}.*{CHANGES}.*calls"),
    (lambda model: model.embed.weight.register_hook(Decaying()), f"{HOOK}.*{CHANGES}.*factor"),
    (own_generator, HOOK),
    (reads_module, f"{HOOK}.*reaches the model itself .*model.*by value"),
    (reads_parameter, f"{HOOK}.*reaches the parameter head.bias.*by value"),
    (steps, f"{HOOK}.*{CHANGES}.*weight"),
    (reads_grad, f"{HOOK}.*reads .grad"),
    (accumulated, "register_post_accumulate_grad_hook.*embed.weight.*register_hook"),
    (other_shape, f"{HOOK}.*shape"),
    (fails, f"{HOOK}.*no_such_thing"),
)


def test_hooks_that_functions_cannot_repeat_are_refused() -> None:
    for register, text in REFUSED:
        with pytest.raises(ModelError, match=text):
            job_of(script(register))


def test_the_way_out_of_a_hook_that_reaches_the_model_works() -> None:
    def register(model: Any) -> None:
        scale = model.head.bias.detach().clone()
        model.embed.weight.register_hook(lambda gradient: gradient * scale.mean())

    assert_equal(script(register))


def test_a_divided_optimiser_is_refused_with_the_names() -> None:
    with pytest.raises(PlanError, match=r"hooks of embed.weight .*shard_optimizer"):
        run_over_functions(script(masks_rows), replicas=2, plan_changes={"shard_optimizer": True})


def test_gradients_that_travel_scaled_reach_hooks_unscaled() -> None:
    one = script(clamps_all)
    found = run_over_functions(one, stages=3, replicas=2, plan_changes={"wire_back": Wire.FP16})
    assert worst_difference(one, found, run_script(one)[0])[0] < 0.05  # fp16 rounds; scaled ones would all be cut off


def test_with_a_scaled_loss_only_hooks_that_scale_with_the_gradient_run() -> None:
    fp16 = {"precision": "fp16"}
    with pytest.raises(ModelError, match=r"hook of embed.weight.*fp16.*bf16"):
        run_over_functions(script(clamps_all, recipe=fp16))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
@pytest.mark.parametrize("wrapped", ["weight_norm", "parametrized", "spectral", "pruned"])
def test_what_torch_registers_itself_trains_as_before(wrapped: str) -> None:
    def make() -> tuple[nn.Module, Any]:
        model = Language()
        layer: Any = model.blocks[0][0]  # type: ignore[index]
        if wrapped == "weight_norm":
            nn.utils.weight_norm(layer)
        elif wrapped == "parametrized":
            nn.utils.parametrizations.weight_norm(layer)
            layer.parametrizations.weight.original1.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
        elif wrapped == "spectral":
            nn.utils.parametrizations.orthogonal(layer)
        else:
            prune.random_unstructured(layer, "weight", amount=0.5)  # type: ignore[no-untyped-call]
            layer.weight_orig.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
        return model, word_loss

    assert_equal(Script(make=make, samples=sentences), stages=2, replicas=2)


def test_hooks_of_all_modules_are_refused() -> None:
    handle = register_module_forward_hook(lambda module, args, output: None)
    try:
        with pytest.raises(ModelError, match=r"register_module_forward_hook.*other processes.*register_forward_hook"):
            run_over_functions(script(frozen))
    finally:
        handle.remove()
