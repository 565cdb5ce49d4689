import mmap

import pytest
import torch

from funcpipe.comm.buffer_pool import BufferPool, block

SIZES = [0, 1, 1 << 20, (1 << 22) + 1]


@pytest.mark.parametrize("size", SIZES)
def test_a_block_has_as_many_bytes_as_asked_for_and_all_can_be_written(size: int) -> None:
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


def test_a_pool_lends_again_what_came_back_and_replaces_it_by_what_is_larger() -> None:
    pool = BufferPool()
    with pool.lend(100_000) as first:
        pass
    with pool.lend(90_000) as again:
        assert again is first
    with pool.lend(200_000) as larger:
        assert larger.numel() == 200_000
    with pool.lend(90_000) as kept, pool.lend(90_000) as fresh:
        assert kept is larger
        assert fresh.numel() == 90_000
