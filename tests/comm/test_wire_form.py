"""What tensors are on their way: sizes, and messages in 8 bits."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from funcpipe.comm.block_int8 import BLOCK
from funcpipe.comm.codec import decode, encode, encode_series, is_same, message_bytes
from funcpipe.comm.signature import CHECKSUM
from funcpipe.comm.wire_form import FORMS, form_of
from funcpipe.core import Wire
from funcpipe.errors import CorruptMessage
from tests.comm.test_block_int8 import AT_ONCE, quantised
from tests.comm.test_codec import DTYPES, tensors

counts = st.sampled_from([0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, AT_ONCE - 1, AT_ONCE + 1, 2 * AT_ONCE])


def vector(count: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * scale


def through(values: Tensor) -> Tensor:
    return decode(encode({"x": values}, Wire.INT8))["x"]


@given(counts, st.integers(0, 2**32), st.floats(-30, 30))
@example(AT_ONCE - 1, 827, -1.8684163847209803)
def test_what_arrives_moves_by_at_most_half_a_scale_of_its_block(count: int, seed: int, power: float) -> None:
    """Besides, the quotient is rounded to 32 bits and the product is: each by half a unit of the largest number."""
    values = vector(count, seed, 2.0**power)
    found = through(values).double()
    for block, sent in zip(torch.split(found, BLOCK), torch.split(values.double(), BLOCK), strict=True):
        assert count == 0 or (block - sent).abs().max() <= sent.abs().max() * (1 / 254 + 2 * 2.0**-24)


@given(st.dictionaries(st.text(max_size=10), tensors(), max_size=4), st.sampled_from(Wire))
def test_a_message_is_as_long_as_its_shapes_say_and_only_32_bit_floats_are_rounded(
    message: dict[str, Tensor], wire: Wire
) -> None:
    data = encode(message, wire)
    assert data.nbytes == message_bytes({name: t.to("meta") for name, t in message.items()}, wire)
    assert is_same(data, bytes(data), [message], wire, proof=CHECKSUM)
    for name, found in decode(data).items():
        assert (found.dtype, found.shape) == (message[name].dtype, message[name].shape)
        if found.dtype is not torch.float32:
            assert torch.equal(found, message[name])


@given(counts, st.integers(0, 2**32))
def test_a_message_in_8_bits_is_read_from_a_series_and_into_tensors_that_are_there(count: int, seed: int) -> None:
    messages = [{"n": torch.arange(3), "x": vector(count, seed)}, {"x": vector(count, seed + 1).view(1, count)}]
    series = encode_series(messages, Wire.INT8)
    start = 0
    for message in messages:
        stop = start + message_bytes(message, Wire.INT8)
        into = torch.full(message["x"].shape, torch.nan)
        found = decode(series[start:stop], into={"x": into}, offset=start)["x"]
        assert found is into
        assert into.numpy().tobytes() == through(message["x"]).numpy().tobytes()
        start = stop
    assert start == series.nbytes


def test_views_in_any_order_of_elements_are_rounded_as_they_are_read() -> None:
    values = vector(6 * BLOCK, 0).view(4, -1)
    for view in (values.t(), values[:, ::3], values[1], values[:, 5], torch.complex(values, values).conj().imag):
        plain = torch.tensor(view.tolist())
        assert through(view).numpy().tobytes() == through(plain).numpy().tobytes()


def test_16_mb_take_a_byte_for_each_number_and_four_for_each_block() -> None:
    count = 2**22
    assert form_of(torch.float32, Wire.INT8).size(count) == count + count // BLOCK * 4
    heads = 128
    assert message_bytes({"x": torch.empty(count, device="meta")}, Wire.INT8) == Wire.INT8.ratio * 4 * count + heads


@pytest.mark.parametrize("wire", Wire)
@pytest.mark.parametrize("dtype", DTYPES)
def test_forms_are_found_by_the_name_that_messages_give_them(dtype: torch.dtype, wire: Wire) -> None:
    form = form_of(dtype, wire)
    assert FORMS[form.name].size(1000) == form.size(1000)


@given(st.integers(0, 2**32), st.integers(-20, 20))
def test_a_loss_that_is_scaled_by_a_power_of_two_changes_no_digit(seed: int, power: int) -> None:
    values = vector(2 * BLOCK, seed)
    assert torch.equal(through(values * 2.0**power), through(values) * 2.0**power)


def test_an_overflow_is_seen_by_whoever_receives_it() -> None:
    values = torch.ones(3 * BLOCK)
    values[BLOCK] = math.inf
    assert [block.isfinite().all().item() for block in torch.split(through(values), BLOCK)] == [True, False, True]


def test_the_largest_numbers_stay_finite() -> None:
    """Models mask with them: infinite ones would make rows that are masked as a whole NaN."""
    most = torch.finfo(torch.float32).max
    values = torch.tensor([-most, most, 0.0])
    assert torch.allclose(through(values), values, rtol=1e-6)
    assert quantised(values)[0].tolist() == [-127, 127, 0]


def test_8_bits_are_read_as_32_and_as_nothing_else() -> None:
    message = encode({"x": torch.ones(300)}, Wire.INT8)
    for dtype in (torch.int8, torch.float64, torch.bfloat16):
        with pytest.raises(CorruptMessage, match="sent as int8x256, does not fit"):
            decode(message, into={"x": torch.empty(300, dtype=dtype)})
