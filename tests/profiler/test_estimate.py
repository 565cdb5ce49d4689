"""Seconds and bytes of layers that are not run, beside formulas by hand and what is measured of layers that are."""

import pytest
import torch
from torch import nn

from funcpipe.core.accelerator import Accelerator
from funcpipe.errors import InvalidValue
from funcpipe.model.graph import trace
from funcpipe.model.split.cut import stage_of
from funcpipe.model.weightless import Weightless
from funcpipe.platforms.catalog import load_spec
from funcpipe.profiler import estimate
from funcpipe.profiler.measure import measure_here
from funcpipe.profiler.profile import profile

BATCH, WIDTH = 16, 64
DEVICE = Accelerator.measured("x", flop_s=1e9, bytes_s=1e12, memory_mb=1)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "processor", lambda dtype: DEVICE)


@pytest.mark.parametrize("weightless", [False, True])
def test_seconds_follow_from_operations(weightless: bool) -> None:
    model, sample = network(), torch.randn(BATCH, WIDTH)
    if weightless:
        mode = Weightless()
        for i, part in enumerate(model):
            weight = nn.Parameter(part.get_parameter("weight").to("meta"))
            part._parameters["weight"] = mode.empty(weight, f"{i}.weight")  # type: ignore[assignment]
    spec = load_spec("aws-lambda")
    found = profile(trace(model, (sample,)), (sample,), spec=spec, micro_batch=BATCH, repeats=0)
    product_s = 2 * BATCH * WIDTH * WIDTH / 1e9
    for layer, products in zip(found.layers, (1, 2), strict=True):  # the first one's input needs no gradient
        assert layer.forward_s == pytest.approx([product_s / size.vcpu for size in spec.sizes])
        assert layer.backward_s == pytest.approx([products * product_s / size.vcpu for size in spec.sizes])
    assert found.estimated
    assert [layer.parameter_bytes for layer in found.layers] == [4 * WIDTH * WIDTH] * 2


def test_memory_is_what_is_measured_of_the_layer_itself() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    sample = torch.randn(BATCH, WIDTH)
    graph = trace(nn.Sequential(model), (sample,), blocks=("0",))
    stage, given = stage_of(graph, 0, 1), graph.signature.bind((sample,), {})
    measured = measure_here(stage, given, None, 1)
    stage.zero_grad()
    found = estimate.estimated(stage, given, None)
    assert found.workspace_bytes == pytest.approx(measured.workspace_bytes, rel=0.2)
    assert (found.forward_work, found.backward_work) == (measured.forward_work, measured.backward_work)


def test_functions_time_layers_at_least_once() -> None:
    model, sample, spec = network(), torch.randn(BATCH, WIDTH), load_spec("aws-lambda")
    with pytest.raises(InvalidValue, match="repeats"):
        profile(
            *(trace(model, (sample,)), (sample,)),
            spec=spec,
            micro_batch=BATCH,
            repeats=0,
            on=estimate.estimator(spec),
        )
