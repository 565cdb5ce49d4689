"""What layers compute, counted, beside formulas by hand."""

import pytest
import torch
from torch import nn
from torch._higher_order_ops.out_dtype import out_dtype
from torch.nn import functional as F

from funcpipe.core.accelerator import Accelerator, Work, total
from funcpipe.core.choices import Precision
from funcpipe.model.graph import trace
from funcpipe.platforms.catalog import load_spec
from funcpipe.profiler.profile import profile
from funcpipe.profiler.work import WorkCounter

BATCH, INPUTS, OUTPUTS = 8, 32, 16
PRODUCT = 2 * BATCH * INPUTS * OUTPUTS
"""The operations of a product of matrices."""


def test_a_linear_layer_without_bias() -> None:
    x, layer = torch.randn(BATCH, INPUTS, requires_grad=True), nn.Linear(INPUTS, OUTPUTS, bias=False)
    moved = 4 * (BATCH * INPUTS + INPUTS * OUTPUTS + BATCH * OUTPUTS)
    with WorkCounter() as forward:
        y = layer(x)
    assert forward.work == Work(flop=PRODUCT, dense_bytes=moved, other_bytes=0)
    with WorkCounter() as backward:
        y.backward(torch.ones_like(y))
    assert (backward.work.flop, backward.work.dense_bytes) == (2 * PRODUCT, 2 * moved)


def test_views_move_nothing_and_other_operators_bytes() -> None:
    x = torch.randn(4, 6)
    with WorkCounter() as views:
        torch.empty_like(x.t()[0].unsqueeze(0))
    assert views.work == Work(flop=0, dense_bytes=0, other_bytes=0)
    with WorkCounter() as copied:
        x.t().reshape(2, 2, 6)  # what was transposed is not dense
    assert copied.work == Work(flop=0, dense_bytes=0, other_bytes=2 * x.nbytes)
    with WorkCounter() as added:
        torch.relu(x)
    assert added.work == Work(flop=0, dense_bytes=0, other_bytes=2 * x.nbytes)


def test_an_operator_that_takes_operators_counts_with_what_it_reads_and_writes() -> None:
    a, b = torch.ones(2, 3, dtype=torch.int8), torch.ones(3, 4, dtype=torch.int8)
    with WorkCounter() as counted:
        y = out_dtype(torch.ops.aten.mm.default, torch.int32, a, b)
    assert y.shape == (2, 4)
    assert counted.work == Work(flop=0, dense_bytes=0, other_bytes=6 + 12 + 4 * 8)


def test_a_profile_holds_the_work_of_each_layer() -> None:
    model = nn.Sequential(nn.Linear(INPUTS, OUTPUTS, bias=False), nn.Tanh(), nn.Linear(OUTPUTS, 4, bias=False))
    sample = torch.randn(BATCH, INPUTS)
    found = profile(trace(model, (sample,)), (sample,), spec=load_spec("local"), micro_batch=BATCH, repeats=1)
    first, middle, last = found.layers
    assert (first.forward_work, middle.forward_work, last.forward_work) == (
        Work(flop=PRODUCT, dense_bytes=4 * (BATCH * INPUTS + INPUTS * OUTPUTS + BATCH * OUTPUTS), other_bytes=0),
        Work(flop=0, dense_bytes=0, other_bytes=2 * 4 * BATCH * OUTPUTS),
        Work(flop=2 * BATCH * OUTPUTS * 4, dense_bytes=4 * (BATCH * OUTPUTS + OUTPUTS * 4 + BATCH * 4), other_bytes=0),
    )
    with WorkCounter() as whole:
        model(sample)
    assert total(layer.forward_work for layer in found.layers) == whole.work
    assert found.work is not None
    assert found.work.flop > 2 * whole.work.flop  # the first layer's input needs no gradient


def test_a_convolution_computes_as_many_operations_as_its_windows_have() -> None:
    layer = nn.Conv2d(3, 5, 3, padding=1, bias=False)
    x = torch.randn(2, 3, 8, 8)
    with WorkCounter() as counted:
        F.relu(layer(x))
    assert counted.work.flop == 2 * (2 * 5 * 8 * 8) * (3 * 3 * 3)
    assert counted.work.other_bytes == 2 * 4 * (2 * 5 * 8 * 8)


def test_a_device_is_bound_by_arithmetic_or_by_memory() -> None:
    device = Accelerator(
        name="x", memory_mb=1, vcpu_equivalents=1.0, fp32_tflop_s=10.0, bf16_tflop_s=40.0, memory_gb_s=100.0
    )
    products = Work(flop=9 * 10**12, dense_bytes=10**9, other_bytes=0)
    assert device.seconds(products, Precision.FP32) == pytest.approx(1.0)  # 9 of 10 x 0.9
    assert device.seconds(products, Precision.BF16) == pytest.approx(0.25)
    moved = Work(flop=9 * 10**9, dense_bytes=10**9, other_bytes=3 * 10**9)
    assert device.seconds(moved, Precision.FP32) == pytest.approx(4 / 50)
    assert total([products, moved]) == Work(flop=9009 * 10**9, dense_bytes=2 * 10**9, other_bytes=3 * 10**9)
    assert total([products, None]) is None
    unknown = Accelerator(name="x", memory_mb=1, vcpu_equivalents=1.0)
    assert unknown.seconds(products, Precision.FP32) is None
