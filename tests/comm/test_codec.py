import json
import struct

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from funcpipe.comm.codec import decode, encode
from funcpipe.core import Wire
from funcpipe.errors import CorruptMessage, InvalidValue

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]
shapes = st.lists(st.integers(0, 5), max_size=4)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(shapes)
    made = (torch.randn(shape, generator=generator) * 100).to(dtype)
    if made.ndim >= 2 and draw(st.booleans()):
        made = made.transpose(0, 1)
    if made.ndim >= 1 and made.shape[0] > 1 and draw(st.booleans()):
        made = made[::2]
    return made


@given(st.dictionaries(st.text(max_size=10), tensors(), max_size=4))
def test_tensors_read_back_as_they_were_written(message: dict[str, Tensor]) -> None:
    found = decode(bytes(encode(message)))
    assert list(found) == list(message)
    for name, tensor in message.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor) or torch.isnan(tensor.float()).any()


def test_what_is_read_is_memory_of_its_own() -> None:
    data = bytes(encode({"a": torch.zeros(3)}))
    first = decode(data)["a"]
    first += 1
    assert decode(data)["a"].tolist() == [0, 0, 0]


def test_a_tensor_may_be_read_as_what_it_travelled_in_but_as_nothing_else() -> None:
    values = torch.randn(1000)
    message = encode({"x": values}, Wire.BF16)
    short, wide = torch.empty(1000, dtype=torch.bfloat16), torch.empty(1000)
    assert decode(message, into={"x": short})["x"] is short
    decode(message, into={"x": wide})
    assert torch.equal(short, values.to(torch.bfloat16))
    assert torch.equal(short.float(), wide)
    with pytest.raises(CorruptMessage, match="does not fit"):
        decode(message, into={"x": torch.empty(1000, dtype=torch.float16)})
    with pytest.raises(CorruptMessage, match="does not fit"):
        decode(encode({"x": values}), into={"x": short})


@given(st.lists(st.floats(width=32, allow_nan=False), max_size=50))
def test_what_has_been_rounded_once_travels_as_it_is(numbers: list[float]) -> None:
    once = decode(encode({"x": torch.tensor(numbers)}, Wire.BF16))["x"]
    twice = decode(encode({"x": once}, Wire.BF16))["x"]
    assert once.numpy().tobytes() == twice.numpy().tobytes()


@pytest.mark.parametrize(("wire", "dtype"), [(Wire.BF16, torch.bfloat16), (Wire.FP16, torch.float16)])
def test_only_32_bit_floats_travel_in_another_format(wire: Wire, dtype: torch.dtype) -> None:
    sent = {"x": torch.randn(64), "n": torch.arange(64), "d": torch.randn(64, dtype=torch.float64)}
    message = encode(sent, wire)
    found = decode(message)
    assert torch.equal(found["x"], sent["x"].to(dtype).float())
    assert torch.equal(found["n"], sent["n"])
    assert torch.equal(found["d"], sent["d"])
    assert encode(sent).nbytes - message.nbytes == 128


def test_every_changed_or_lost_byte_is_noticed() -> None:
    message = bytes(encode({"a": torch.arange(7), "b": torch.zeros(())}))
    for place in range(len(message)):
        changed = bytearray(message)
        changed[place] ^= 0x10
        with pytest.raises(CorruptMessage):
            decode(changed)
    for length in range(len(message)):
        with pytest.raises(CorruptMessage):
            decode(message[:length])
    with pytest.raises(CorruptMessage):
        decode(message + b"\0")


@pytest.mark.parametrize(
    "description",
    [
        None,
        3,
        [3],
        [["a"]],
        [["a", "float32", [4], "float32", 1 << 60]],
        [["a", "float32", [1 << 40], "float32", 0]],
        [["a", "float32", [-4], "float32", 0]],
        [["a", "float32", [-1, -4], "float32", 0]],
        [["a", "float32", [4], "float32", -4]],
        [["a", "float99", [4], "float32", 0]],
        [["a", "float32", ["x"], "float32", 0]],
        [["a", "float32", None, "float32", 0]],
        [[[], "float32", [1], "float32", 0]],
        [["a", "float32", [1 << 40], "int8x256", 0]],
        [["a", "float32", [-300], "int8x256", 0]],
        [["a", "float32", [4], "int8x256", 1 << 60]],
        [["a", "float32", [4.0], "int8x256", 0]],
        [["a", "float32", [200], "int8x256", 0]],
        [["a", "float32", [4], "int8x256", 0], ["b", "float32", [4], "int8x256", 7]],
        [["a", "int64", [4], "int8x256", 0]],
        [["a", "int8x256", [4], "int8x256", 0]],
        [["a", "float32", [4], "int8x255", 0]],
    ],
)
def test_a_description_that_does_not_fit_its_bytes_is_refused(description: object) -> None:
    text = json.dumps(description).encode()
    with pytest.raises(CorruptMessage, match="cannot be read"):
        decode(with_head(text.ljust(64 * 4 - 36, b"\0"), len(text)))


def with_head(rest: bytes, length: int) -> bytes:
    """`rest` behind a head whose checksum is right."""
    return struct.pack("<4sI28s", b"FPM2", length, xxhash.xxh3_64_digest(rest)) + rest


@given(st.binary(max_size=200), st.integers(0, 2**32 - 1))
def test_any_bytes_are_a_message_or_refused(data: bytes, length: int) -> None:
    for candidate in (data, with_head(data, length), with_head(data, len(data))):
        with pytest.raises(CorruptMessage):
            decode(candidate)


def test_what_cannot_be_written_or_read_into_is_refused() -> None:
    with pytest.raises(InvalidValue, match="must have room for 192 bytes"):
        encode({"x": torch.zeros(4)}, buffer=torch.empty(8, dtype=torch.uint8))
    with pytest.raises(InvalidValue, match="must be dense"):
        encode({"x": torch.zeros(4).to_sparse()})
    with pytest.raises(CorruptMessage, match=r"does not fit torch.float32, \[5\]"):
        decode(encode({"x": torch.zeros(4)}), into={"x": torch.zeros(5)})
