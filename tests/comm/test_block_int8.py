"""Blocks of 256 numbers in 8 bits, by the compiled kernel and by operators of torch."""

import shutil

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from funcpipe.comm import block_int8
from funcpipe.comm.block_int8 import BLOCK, blocks_in, largest_in_blocks, quantise, restore

AT_ONCE = 256 * BLOCK
ODD = np.array(
    [-0.0, 0.0, np.nan, -np.nan, np.inf, -np.inf, 1e-45, -1e-45, 1e-38, -1e-40, 3.4e38, -3.4028235e38], dtype=np.float32
)
Floats = npt.NDArray[np.float32]
counts = st.sampled_from([0, AT_ONCE - 1, AT_ONCE, AT_ONCE + 1, 2 * AT_ONCE + BLOCK + 3]) | st.integers(0, 4 * BLOCK)


def plainly_quantised(values: Floats, kept: Floats | None) -> tuple[npt.NDArray[np.int8], Floats, Floats | None]:
    """Whole numbers, scales, and what is kept then: block by block, with a case for each sort of number."""
    whole, scales = np.zeros(len(values), dtype=np.int8), np.zeros(blocks_in(len(values)), dtype=np.float32)
    rest = None if kept is None else kept.copy()
    for block in range(len(scales)):
        here = slice(BLOCK * block, BLOCK * (block + 1))
        some, missing = values[here], (values[here] == 0) & np.signbit(values[here])
        wanted = some if kept is None else np.where(missing, some, some + kept[here])
        largest = np.abs(wanted).max() / np.float32(127)
        most = np.float32(np.finfo(np.float32).max) / np.float32(127) * np.float32(1 - 2.0**-23)
        scales[block] = scale = min(largest, most) if np.isfinite(largest) else np.float32(np.nan)
        shares = wanted / scale
        shares = np.clip(np.rint(np.where(np.isfinite(shares), shares, 0)), -127, 127)
        whole[here] = np.where(missing, -128, shares)
        if rest is not None and kept is not None:
            lost = wanted - np.where(missing, np.float32(0), shares * scale)
            rest[here] = np.where(missing, kept[here], np.where(np.isfinite(lost), lost, 0))
    return whole, scales, rest


def plainly_restored(whole: npt.NDArray[np.int8], scales: Floats) -> Floats:
    found = whole.astype(np.float32) * np.repeat(scales, BLOCK)[: len(whole)] + np.float32(0)
    return np.where(whole == -128, np.float32(-0.0), found)


def drawn(count: int, seed: int, power: float, odd: float) -> Floats:
    """Numbers of which a share of `odd` is not usual, in some blocks alone."""
    chance = np.random.default_rng(seed)
    values = (chance.standard_normal(count) * 2.0**power).astype(np.float32)
    blocks = np.repeat(chance.random(blocks_in(count)) < 0.5, BLOCK)[:count]
    return np.where(blocks & (chance.random(count) < odd), chance.choice(ODD, count), values)


def quantised(values: torch.Tensor, kept: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    whole, scales = torch.empty(len(values), dtype=torch.int8), torch.empty(blocks_in(len(values)))
    quantise(values, whole, scales, kept=kept)
    return whole, scales


def through(values: torch.Tensor) -> torch.Tensor:
    found = torch.empty_like(values)
    restore(*quantised(values), found)
    return found


@pytest.fixture(params=["compiled", "operators"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of rounding, one after the other."""
    if request.param == "operators":
        monkeypatch.setattr(block_int8, "kernel", None)
    else:
        needs_the_kernel()


def needs_the_kernel() -> None:
    """Skip a test where there is no compiler; fail it where there is one and yet no kernel."""
    if block_int8.kernel is None:
        assert shutil.which("cc") is None, "the kernel is not built: run `make setup` again"
        pytest.skip("no compiler: the kernel is not built here")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(counts, st.integers(0, 2**32), st.floats(-150, 127), st.sampled_from([0.0, 0.004, 0.3]), st.booleans())
@example(AT_ONCE + 1, 1, -149.0, 0.0, True)
@example(3 * BLOCK, 2, 0.0, 1.0, True)
@np.errstate(all="ignore")
def test_numbers_have_the_bits_of_the_plain_formulation(
    way: None, count: int, seed: int, power: float, odd: float, feeds_back: bool
) -> None:
    kept = torch.zeros(count) if feeds_back else None
    plain_kept = np.zeros(count, dtype=np.float32) if feeds_back else None
    total = torch.ones(count)
    for step in range(2):
        values = drawn(count, seed + step, power, odd)
        whole, scales = quantised(torch.from_numpy(values), kept)
        plain_whole, plain_scales, plain_kept = plainly_quantised(values, plain_kept)
        assert whole.numpy().tobytes() == plain_whole.tobytes()
        assert scales.numpy().tobytes() == plain_scales.tobytes()
        if kept is not None and plain_kept is not None:
            assert kept.numpy().tobytes() == plain_kept.tobytes()
        found = torch.empty(count)
        restore(whole, scales, found)
        assert found.numpy().tobytes() == plainly_restored(plain_whole, plain_scales).tobytes()
        summed = total + found
        restore(whole, scales, total, adds=True)
        assert total.numpy().tobytes() == summed.numpy().tobytes()


def test_what_is_given_stays_as_it_is(way: None) -> None:
    values = torch.from_numpy(drawn(AT_ONCE + 5, 0, 0.0, 0.1))
    before = values.clone()
    quantised(values, torch.ones(AT_ONCE + 5))
    assert values.numpy().tobytes() == before.numpy().tobytes()


def test_numbers_go_to_the_nearest_of_their_scale_and_to_the_even_one_of_two(way: None) -> None:
    found = through(torch.tensor([127.0, 0.5, 1.5, -0.0, -2.5, -0.4]))
    assert found.tolist() == [127.0, 0.0, 2.0, 0.0, -2.0, 0.0]
    assert found.signbit().tolist() == [False, False, False, True, True, False]


def test_the_last_block_may_be_short_and_none_moves_by_more_than_half_a_scale() -> None:
    values = torch.randn(3 * BLOCK + 5, generator=torch.Generator().manual_seed(0))
    for first in range(0, len(values), BLOCK):
        block, found = values[first : first + BLOCK], through(values)[first : first + BLOCK]
        assert (found - block).abs().max() <= block.abs().max() / 254 * (1 + 1e-5)


def test_a_block_with_a_number_that_is_not_finite_is_lost_as_a_whole_and_others_are_not(way: None) -> None:
    for odd in (torch.inf, -torch.inf, torch.nan):
        values = torch.ones(2 * BLOCK)
        values[3] = odd
        found = through(values)
        assert found[:BLOCK].isnan().all()
        assert (found[BLOCK:] == 1).all()


def test_numbers_too_small_for_a_scale_come_out_as_zero_and_not_as_missing(way: None) -> None:
    found = through(torch.tensor([-1e-45, 1e-45]))
    assert found.tolist() == [0.0, 0.0]
    assert not found.signbit().any()
    assert through(torch.zeros(0)).numel() == 0


def test_the_kernel_refuses_vectors_that_do_not_fit() -> None:
    needs_the_kernel()
    numbers, whole, scales = torch.zeros(BLOCK + 1), torch.zeros(BLOCK + 1, dtype=torch.int8), torch.zeros(2)
    for some, small, kept in ((whole, scales[:1], numbers), (whole[1:], scales, numbers), (whole, scales, numbers[1:])):
        with pytest.raises(ValueError, match="a 32-bit scale for each block"):
            quantise(numbers, some, small, kept=kept)
    with pytest.raises(ValueError, match="a 32-bit scale for each block"):
        restore(whole, scales, numbers[1:])


def test_each_number_knows_the_largest_of_its_block() -> None:
    values = torch.zeros(2, BLOCK)
    values[0, 3], values[1, 5] = -2.0, 3.0
    assert largest_in_blocks(values)[0].tolist() == [2.0] * BLOCK
    assert largest_in_blocks(values.view(-1)[: BLOCK + 6]).tolist() == [2.0] * BLOCK + [3.0] * 6
