import mmap

import pytest
import torch

from funcpipe.comm.buffer_pool import block

SIZES = [0, 1, 1 << 20, (1 << 22) + 1]


@pytest.mark.parametrize("size", SIZES)
def test_a_block_has_so_many_bytes_that_can_be_written(size: int) -> None:
    made = block(size)
    assert made.shape == (size,)
    assert made.dtype is torch.uint8
    assert int(made.fill_(3).sum(dtype=torch.int64)) == 3 * size


@pytest.mark.parametrize("missing", ["advice", "kernel"])
def test_a_system_without_huge_pages_does_without(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    if missing == "advice":
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    else:
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999, raising=False)  # which no kernel knows
    assert int(block(1 << 21).fill_(1).sum(dtype=torch.int64)) == 1 << 21
