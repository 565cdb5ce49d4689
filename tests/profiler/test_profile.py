"""What a profile says of small models, counted by hand or measured another way."""

import copy
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcpipe.api import FuncPipe
from funcpipe.core import FunctionSize, ModelProfile, PlatformSpec, Precision
from funcpipe.core.accelerator import Accelerator
from funcpipe.errors import DataError, InvalidValue, RunError
from funcpipe.model.graph import trace
from funcpipe.model.split.cut import stage_of
from funcpipe.profiler import measure
from funcpipe.profiler.measure import measure_here
from funcpipe.profiler.profile import profile
from tests.model.graph.models import CausalTransformer, ResidualNet
from tests.model.split.chain import assert_same


def size(memory_mb: int, vcpu: float) -> FunctionSize:
    return FunctionSize(
        name=f"{memory_mb}MB",
        memory_mb=memory_mb,
        vcpu=vcpu,
        upload_bytes_s=1e7,
        download_bytes_s=1e7,
        price_usd_s=1e-5,
    )


SPEC = PlatformSpec(
    name="local",
    region="here",
    as_of="2026-11",
    source="test",
    sizes=(size(512, 0.5), size(1024, 1.0), size(2048, 2.0)),
    latency_s=0.0,
    contention=1.0,
    shared_bytes_s=None,
    price_put_usd=0.0,
    price_get_usd=0.0,
    price_invocation_usd=0.0,
    lifetime_s=None,
    cold_start_s=0.0,
    max_functions=8,
    max_payload_bytes=1 << 20,
)


def profiled(model: nn.Module, x: Tensor, micro_batch: int, **options: Any) -> ModelProfile:
    return profile(
        trace(model, (x,)), (x,), spec=options.pop("spec", SPEC), micro_batch=micro_batch, repeats=2, **options
    )


def test_bytes_of_a_chain_counted_by_hand() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3, bias=False))
    found = profiled(model, torch.randn(5, 4), micro_batch=2)
    assert [layer.name for layer in found.layers] == ["0", "1", "2"]
    assert [layer.parameter_bytes for layer in found.layers] == [4 * (4 * 8 + 8), 0, 4 * 8 * 3]
    # The first saves its input, the ReLU its result, which is all that the last one saves as well.
    assert [layer.activation_bytes for layer in found.layers] == [4 * 2 * 4, 4 * 2 * 8, 0]
    assert [layer.input_bytes for layer in found.layers] == [4 * 2 * 4, 0, 0]
    assert [(t.name, t.producer, t.consumers) for t in found.tensors] == [("0", 0, (1,)), ("1", 1, (2,))]
    assert [(t.forward_bytes, t.backward_bytes) for t in found.tensors] == [(64, 64), (64, 64)]


def test_frozen_parameters_and_buffers_are_constants_and_send_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    found = profiled(model, torch.randn(5, 4), micro_batch=5)
    assert [layer.parameter_bytes for layer in found.layers] == [0, 0, 4 * (16 + 4)]
    assert [layer.constant_bytes for layer in found.layers] == [64, 2 * 16 + 2 * 16 + 8, 0]
    assert [layer.activation_bytes for layer in found.layers] == [0, 0, 80]
    assert [t.backward_bytes for t in found.tensors] == [0, 0]


class Reads(nn.Module):
    """One tensor that three layers save, a tied weight, a skip connection over several layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        self.b = nn.Linear(4, 4, bias=False)
        self.c = nn.Linear(4, 4, bias=False)
        self.c.weight = self.b.weight

    def forward(self, x: Tensor) -> Any:
        x = self.a(x)
        return self.b(x) * self.c(x) * x


def test_a_storage_that_several_layers_save_counts_once() -> None:
    found = profiled(Reads(), torch.randn(2, 4), micro_batch=2)
    # a saves the input; b saves what a made; c saves nothing new but the factors of the two products made behind it,
    # of which x was saved before.
    assert [layer.activation_bytes for layer in found.layers] == [32, 32, 3 * 32]
    assert [layer.parameter_bytes for layer in found.layers] == [64, 64, 64]
    assert [(t.producer, t.consumers) for t in found.tensors] == [(0, (1, 2)), (1, (2,))]


@pytest.mark.parametrize("micro_batch", [1, 2, 7])
def test_bytes_are_those_of_the_micro_batch(micro_batch: int) -> None:
    found = profiled(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), torch.randn(3, 4), micro_batch)
    assert found.micro_batch == micro_batch
    assert found.layers[0].input_bytes == 16 * micro_batch
    assert found.tensors[0].forward_bytes == 32 * micro_batch


def test_activations_are_what_autograd_holds_in_a_plain_run() -> None:
    for model, x in ((ResidualNet(), torch.randn(4, 1, 8, 8)), (CausalTransformer(), torch.randint(0, 23, (4, 12)))):
        for block in model.modules():
            if isinstance(block, nn.ReLU):
                block.inplace = False
        found = profiled(model, x, micro_batch=4)
        held: dict[int, int] = {}
        constants = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        kept = []

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in constants:  # noqa: B023 - called within this turn of the loop only
                held[storage.data_ptr()] = storage.nbytes()  # noqa: B023
            kept.append(tensor)  # noqa: B023
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(x)
        assert sum(layer.activation_bytes for layer in found.layers) == sum(held.values())


def test_a_profile_in_bf16_counts_what_bf16_sends_and_saves_and_keeps_parameters_in_fp32() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    args = (torch.randn(2, 8),)
    plain, cast = (
        profile(trace(model, args, precision=precision), args, spec=SPEC, micro_batch=2, repeats=1)
        for precision in (Precision.FP32, Precision.BF16)
    )
    assert (plain.precision, cast.precision) == (Precision.FP32, Precision.BF16)
    assert [tensor.forward_bytes for tensor in plain.tensors] == [2 * 8 * 4]
    assert [tensor.forward_bytes for tensor in cast.tensors] == [2 * 8 * 2]
    assert [one.parameter_bytes for one in cast.layers] == [one.parameter_bytes for one in plain.layers]
    assert cast.layers[1].activation_bytes == 2 * 8 * 2 + 8 * 4 * 2  # its input, and its weight in bf16


class Clock:
    """A clock that only layers and losses move on."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What layers are timed by, and what passes while they sleep."""
    made = Clock()
    monkeypatch.setattr(measure, "time", made)
    monkeypatch.setattr(time, "sleep", made.sleep)
    return made


class Passing(torch.autograd.Function):
    """Changes nothing, and takes a time, and another one backward."""

    @staticmethod
    def forward(context: Any, x: Tensor, layer: "Timed") -> Tensor:
        context.layer = layer
        time.sleep(layer.forward_s)
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(context.layer.backward_s)
        return gradient, None


class Timed(nn.Module):
    """A layer that takes `forward_s` and `backward_s` by the clock, whatever it takes really."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        return Passing.apply(self.linear(x), self)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.usefixtures("clock")
def test_seconds_are_those_of_each_layer_and_scale_with_processors() -> None:
    model, x = nn.Sequential(Timed(1.0, 3.0), Timed(0.25, 0.5)), torch.randn(3, 4)
    found = profile(trace(model, (x,), blocks=("0", "1")), (x,), spec=SPEC, micro_batch=3, repeats=5)
    assert [layer.forward_s for layer in found.layers] == [(2.0, 1.0, 0.5), (0.5, 0.25, 0.125)]
    assert [layer.backward_s for layer in found.layers] == [(6.0, 3.0, 1.5), (1.0, 0.5, 0.25)]


@pytest.mark.parametrize(("width", "order"), [(2, "fb fb ffffbbbb"), (1 << 20, "fb fb fb fb fb fb")])
def test_layers_are_timed_with_as_little_in_the_cache_as_in_training(width: int, order: str) -> None:
    """Forwards before their backwards, as many as fill a cache; the first two runs are not timed."""
    model, x, done = nn.Sequential(nn.Linear(1, width)), torch.ones(9, 1), []
    graph = trace(model, (x,))
    stage = stage_of(graph, 0, 1)
    stage.register_forward_hook(lambda *_: done.append("f"))
    for parameter in stage.parameters():
        if parameter.dim() == 2:
            parameter.register_post_accumulate_grad_hook(lambda _: done.append("b"))  # type: ignore[no-untyped-call]
    times = measure_here(stage, graph.signature.bind((x,), {}), None, repeats=4)
    assert "".join(done) == order.replace(" ", "")
    assert len(times.forward_s) == len(times.backward_s) == 4


def test_a_layer_is_not_timed_a_negative_number_of_times() -> None:
    model, x = nn.Sequential(nn.Linear(4, 8)), torch.randn(3, 4)
    with pytest.raises(InvalidValue, match="repeats"):
        profile(trace(model, (x,)), (x,), spec=SPEC, micro_batch=3, repeats=-1)


def test_the_loss_counts_with_the_last_layer(clock: Clock) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))

    def slow(output: Tensor) -> Tensor:
        clock.now_s += 0.5
        return output.sum()

    found = profiled(model, torch.randn(3, 4), 3, loss=slow)
    assert [layer.forward_s[1] for layer in found.layers] == [0.0, 0.5]


def test_only_the_local_platform_is_not_estimated() -> None:
    model, x = nn.Sequential(nn.Linear(4, 8)), torch.randn(3, 4)
    assert not profiled(model, x, 3).estimated
    elsewhere = profiled(model, x, 3, spec=replace(SPEC, name="elsewhere"))
    assert elsewhere.estimated
    assert elsewhere.platform == "elsewhere"
    assert elsewhere.sizes == ("512MB", "1024MB", "2048MB")


@pytest.mark.parametrize(
    ("dtype", "rate"),
    [(torch.float32, "fp32_tflop_s"), (torch.bfloat16, "bf16_tflop_s"), (torch.float16, "bf16_tflop_s")],
)
def test_accelerators_compute_in_the_format_of_most_weights(dtype: torch.dtype, rate: str) -> None:
    """Twice the rate of that format halves the seconds of a product; that of another one changes none."""
    rates = {"fp32_tflop_s": 1e-3, "bf16_tflop_s": 1e-3}
    model, x = nn.Sequential(nn.Linear(64, 64, bias=False)).to(dtype), torch.randn(8, 64, dtype=dtype)

    def seconds(**changed: float) -> float:
        made = Accelerator(
            name="x", memory_mb=64, vcpu_equivalents=1.0, memory_gb_s=1e6, host_device_gb_s=1.0, **{**rates, **changed}
        )
        spec = replace(SPEC, name="elsewhere", sizes=(replace(SPEC.sizes[0], accelerator=made),))
        found = profiled(model, x, 8, spec=spec)
        assert found.estimated
        return found.layers[0].forward_s[0]

    assert seconds(**{rate: 2e-3}) == pytest.approx(seconds() / 2, rel=1e-3)
    assert all(seconds(**{other: 2e-3}) == seconds() for other in rates if other != rate)


def test_the_memory_of_an_idle_function_is_the_platform_s_where_it_was_measured() -> None:
    model, x = nn.Sequential(nn.Linear(4, 8)), torch.randn(3, 4)
    assert profiled(model, x, 3).base_memory_bytes == 200 << 20
    assert profiled(model, x, 3, spec=replace(SPEC, base_memory_bytes=190 << 20)).base_memory_bytes == 190 << 20


def test_profiling_leaves_the_model_alone_and_tells_its_progress() -> None:
    model, x = ResidualNet(), torch.randn(2, 1, 8, 8)
    gradients = [torch.randn_like(parameter) for parameter in model.parameters()]
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    told: list[tuple[str, float]] = []
    found = profiled(model, x, 2, progress=lambda name, share: told.append((name, share)))
    assert_same(model.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert [name for name, _ in told] == [layer.name for layer in found.layers]
    assert told[-1][1] == 1.0


def test_base_memory_is_that_of_a_process_with_torch() -> None:
    assert 100e6 < measure.base_memory_bytes(forked=True) < 1e9


def test_what_an_empty_function_fails_with_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_START", "")
    with pytest.raises(RunError, match=r"(?s)cannot measure the memory of an empty function: .*no_such_module"):
        measure.base_memory_bytes(forked=False, modules=frozenset({"no_such_module"}))


def test_a_sample_unlike_the_traced_one_is_refused() -> None:
    graph = trace(nn.Sequential(nn.Linear(2, 2)), (torch.randn(1, 2),))
    with pytest.raises(DataError, match="too many positional"):
        profile(graph, (torch.randn(1, 2), torch.randn(1, 2)), spec=SPEC, micro_batch=1)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return F.softmax(self.inner(x) * scale, 1)


def test_samples_may_be_given_by_name() -> None:
    pipe = FuncPipe(Scaled(), loss_fn=F.cross_entropy, optimizer=torch.optim.SGD)
    named = pipe.profile({"scale": torch.ones(2, 1), "x": torch.ones(2, 4)}, platform="local", micro_batch=2)
    ordered = pipe.profile((torch.ones(2, 4), torch.ones(2, 1)), platform="local", micro_batch=2)
    assert [layer.name for layer in named.layers] == [layer.name for layer in ordered.layers]
    assert [layer.input_bytes for layer in named.layers] == [layer.input_bytes for layer in ordered.layers]
    assert sum(layer.input_bytes for layer in named.layers) == 4 * (2 * 4 + 2 * 1)
