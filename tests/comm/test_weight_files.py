"""Tensors that are read from safetensors files by ranges of bytes, beside what the safetensors library reads."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from funcpipe.comm import weight_files
from funcpipe.comm.weight_files import fill, make_file, read_header
from funcpipe.core import WeightFile
from funcpipe.errors import CorruptMessage, DataError
from funcpipe.platforms.base import RequestMeter, Storage
from funcpipe.platforms.catalog import open_storage

TENSORS = {
    "a": torch.arange(12.0).view(3, 4),
    "b": torch.arange(5).to(torch.bfloat16),
    "c": torch.tensor(7),
    "d": torch.tensor([True, False]),
    "e": torch.empty(0, 3),
    "f": torch.randn(40, 9, dtype=torch.float16),
}


@pytest.fixture
def url(tmp_path: Path) -> str:
    save_file(TENSORS, tmp_path / "x.safetensors", metadata={"format": "pt"})
    return tmp_path.as_uri()


def read(url: str, names: list[str], meter: RequestMeter | None = None) -> dict[str, Tensor]:
    found = read_header(open_storage(url), url, "x.safetensors")
    targets = {name: torch.empty(found[name].shape, dtype=found[name].dtype) for name in names}
    fill([(found[name], target) for name, target in targets.items()], open_storage, meter)
    return targets


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("piece", [16, 32 << 20])
def test_tensors_are_those_that_were_saved(url: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "_PIECE_BYTES", piece)
    assert all(same(tensor, TENSORS[name]) for name, tensor in read(url, list(TENSORS)).items())


def test_small_neighbours_take_one_request(url: str) -> None:
    meter = RequestMeter()
    read(url, ["a", "f", "c"], meter)
    assert meter.counts.gets == 2  # the header, and all of them


def test_little_is_held_beside_a_large_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage may fill its function's memory, whose plan does not count what is on its way."""
    asked, given = list[int](), weight_files._bytes
    large = torch.arange(40 << 17).view(torch.uint8)
    save_file({"large": large}, tmp_path / "x.safetensors")

    def counted(storage: Storage, file: WeightFile, start: int, stop: int) -> bytes:
        asked.append(stop - start)
        return given(storage, file, start, stop)

    monkeypatch.setattr(weight_files, "_bytes", counted)
    assert torch.equal(read(tmp_path.as_uri(), ["large"])["large"], large)
    assert sum(sorted(asked)[-weight_files._AT_ONCE :]) <= 32 << 20


def test_far_tensors_are_read_apart(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "_GAP_BYTES", 0)
    meter = RequestMeter()
    found = read(url, ["c", "b"], meter)
    assert same(found["b"], TENSORS["b"])
    assert meter.counts.gets in (2, 3)


def test_a_file_that_was_cut_is_refused(url: str, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(DataError, match="bytes long, as its header says"):
        read_header(open_storage(url), url, "x.safetensors")


@pytest.mark.parametrize("contents", [b"", b"hello", b"\xff" * 64, b"\x02" + bytes(7) + b"[]"])
def test_what_is_no_safetensors_file_is_refused(url: str, tmp_path: Path, contents: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(contents)
    with pytest.raises(DataError, match=r"x\.safetensors"):
        read_header(open_storage(url), url, "x.safetensors")


def test_a_tensor_whose_place_is_too_short_for_its_shape_is_refused(url: str, tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(12))
    with pytest.raises(DataError, match=r"float32 and shape \[4\] cannot take 12 bytes"):
        read_header(open_storage(url), url, "x.safetensors")


def test_a_missing_file_is_named(url: str) -> None:
    with pytest.raises(DataError, match=r"no file of weights .*/y.safetensors"):
        read_header(open_storage(url), url, "y.safetensors")


@pytest.mark.parametrize("change", ["other", "renamed", "cut"])
def test_a_file_that_changes_later_is_refused(url: str, tmp_path: Path, change: str) -> None:
    found = read_header(open_storage(url), url, "x.safetensors")
    file = tmp_path / "x.safetensors"
    if change == "other":
        save_file({"a": TENSORS["a"], "g": torch.ones(3)}, file)
    elif change == "renamed":
        file.write_bytes(file.read_bytes().replace(b'"a"', b'"z"'))
    else:
        file.write_bytes(file.read_bytes()[:-800])
    with pytest.raises(CorruptMessage, match="has changed since the run began"):
        fill([(found["f"], torch.empty(40, 9, dtype=torch.float16))], open_storage)


def test_the_header_of_a_large_file_is_read_in_two_requests(tmp_path: Path) -> None:
    many = {f"layer.{i}.with.a.long.name.weight": torch.tensor([i]) for i in range(1500)}
    save_file(many, tmp_path / "x.safetensors")
    url, meter = tmp_path.as_uri(), RequestMeter()
    storage: Storage = open_storage(url, meter=meter)
    assert read_header(storage, url, "x.safetensors").keys() == many.keys()
    assert meter.counts.gets == 3  # two for the header, and one for the last byte


def test_empty_tensors_alone_take_no_request_but_for_the_header(url: str) -> None:
    meter = RequestMeter()
    assert same(read(url, ["e"], meter)["e"], TENSORS["e"])
    assert meter.counts.gets == 1


def test_a_tensor_is_read_into_memory_of_any_strides(url: str) -> None:
    found = read_header(open_storage(url), url, "x.safetensors")
    turned = torch.zeros(4, 3).t()
    fill([(found["a"], turned)], open_storage)
    assert not turned.is_contiguous()
    assert torch.equal(turned, TENSORS["a"])


def test_a_damaged_tensor_of_an_own_file_is_noticed(url: str, tmp_path: Path) -> None:
    """Files that are made here say the SHA-256 of each tensor."""
    file, places = make_file({"a": TENSORS["a"]})
    stored = replace(places["a"], file=replace(places["a"].file, url=url))
    file.write(str(tmp_path / file.name))
    written = (tmp_path / file.name).read_bytes()
    target = torch.empty(3, 4)
    fill([(stored, target)], open_storage)
    assert torch.equal(target, TENSORS["a"])
    (tmp_path / file.name).write_bytes(written[:-1] + bytes([written[-1] ^ 1]))
    with pytest.raises(CorruptMessage, match="is damaged: a tensor of it has another SHA-256"):
        fill([(stored, target)], open_storage)
