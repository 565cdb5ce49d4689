"""Blocks of 256 numbers in 8 bits."""

import torch

from funcpipe.comm.block_int8 import BLOCK, blocks_in, largest_in_blocks, quantised, restored


def through(values: torch.Tensor) -> torch.Tensor:
    whole, scales = quantised(values)
    assert (whole.numel(), scales.numel()) == (values.numel(), blocks_in(values.numel()))
    found = torch.empty_like(values)
    restored(whole, scales, found)
    return found


def test_numbers_go_to_the_nearest_of_their_scale_and_to_the_even_one_of_two() -> None:
    found = through(torch.tensor([127.0, 0.5, 1.5, -0.0, -2.5, -0.4]))
    assert found.tolist() == [127.0, 0.0, 2.0, 0.0, -2.0, 0.0]
    assert found.signbit().tolist() == [False, False, False, True, True, False]


def test_the_last_block_may_be_short_and_none_moves_by_more_than_half_a_scale() -> None:
    values = torch.randn(3 * BLOCK + 5, generator=torch.Generator().manual_seed(0))
    for first in range(0, len(values), BLOCK):
        block, found = values[first : first + BLOCK], through(values)[first : first + BLOCK]
        assert (found - block).abs().max() <= block.abs().max() / 254 * (1 + 1e-5)


def test_a_block_with_a_number_that_is_not_finite_is_lost_as_a_whole_and_others_are_not() -> None:
    for odd in (torch.inf, -torch.inf, torch.nan):
        values = torch.ones(2 * BLOCK)
        values[3] = odd
        found = through(values)
        assert found[:BLOCK].isnan().all()
        assert (found[BLOCK:] == 1).all()


def test_numbers_too_small_for_a_scale_come_out_as_zero_and_not_as_missing() -> None:
    found = through(torch.tensor([-1e-45, 1e-45]))
    assert found.tolist() == [0.0, 0.0]
    assert not found.signbit().any()
    assert through(torch.zeros(0)).numel() == 0


def test_each_number_knows_the_largest_of_its_block() -> None:
    values = torch.zeros(2, BLOCK)
    values[0, 3], values[1, 5] = -2.0, 3.0
    assert largest_in_blocks(values)[0].tolist() == [2.0] * BLOCK
    assert largest_in_blocks(values.view(-1)[: BLOCK + 6]).tolist() == [2.0] * BLOCK + [3.0] * 6
