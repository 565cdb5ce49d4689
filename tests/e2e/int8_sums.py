"""Sums in 8 bits with error feedback, written in NumPy: what functions that sum so must equal to the bit."""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

Floats = np.ndarray[tuple[int], np.dtype[np.float32]]
BLOCK = 256


class Int8Sums:
    """Sums the gradients of replicas, and keeps what rounding takes from each contribution and from the sum.

    `stages` holds for each stage the numbers of the parameters that it sums, in its order: blocks begin anew in each
    stage, and run across the borders of parameters.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[int]],
        sizes: Sequence[int],
        *,
        feeds_back: bool = True,
        order: list[Any] | None = None,
    ) -> None:
        """`sizes` holds the number of elements of each parameter of the model; replicas are added in `order`, where
        lists are groups that are added first.
        """
        self._order = order
        self._stages = stages
        self._sizes = sizes
        self._feeds_back = feeds_back
        self._kept: dict[tuple[int, int], Floats] = {}

    def __call__(self, gradients: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
        """The sum of each parameter's gradients, which `gradients` holds for each replica; None if none has any."""
        sums: list[Tensor | None] = [None] * len(self._sizes)
        for stage, numbers in enumerate(self._stages):
            came = [
                self._sent(np.concatenate([self._flat(own[i], i) for i in numbers]), (stage, replica))
                for replica, own in enumerate(gradients)
            ]
            total = self._added(came, list(range(len(came))) if self._order is None else self._order, stage)
            summed = np.split(self._sent(total, (stage, -1)), np.cumsum([self._sizes[i] for i in numbers]))
            for i, values in zip(numbers, summed, strict=False):
                like = next((own[i] for own in gradients if own[i] is not None), None)
                sums[i] = None if like is None else torch.from_numpy(values.copy()).view(like.shape)
        return sums

    def _flat(self, gradient: Tensor | None, number: int) -> Floats:
        if gradient is None:
            return np.full(self._sizes[number], -0.0, np.float32)
        return gradient.detach().numpy().reshape(-1) + np.float32(0)

    def _added(self, came: Sequence[Floats], order: list[Any], stage: int) -> Floats:
        """The sum of what `came` of replicas, in `order`."""
        found: Floats = reduce(
            np.add,
            [
                came[one]
                if isinstance(one, int)
                else self._sent_by_adders(self._added(came, one, stage), stage, one, len(came))
                for one in order
            ],
        )
        return found

    def _sent_by_adders(self, values: Floats, stage: int, group: list[Any], replicas: int) -> Floats:
        """What arrives of the sum of a group. What it loses is kept by the member that adds: in a tree, which begins
        with a replica, that one. Else blocks are dealt out to all replicas in order, and member i adds those of the
        replicas at place i of all groups.
        """
        came = through_8_bits(values)
        came = np.where(np.signbit(values) & (values == 0), np.float32(-0.0), came)
        lost = values - came
        lost = np.where(np.isfinite(lost), lost, np.float32(0))
        assert self._order is not None
        adders = group[:1] if isinstance(self._order[0], int) else group
        for owner, blocks in enumerate(np.array_split(np.arange(-(-len(values) // BLOCK)), replicas)):
            if self._feeds_back and len(blocks):
                at = slice(blocks[0] * BLOCK, (blocks[-1] + 1) * BLOCK)
                self._kept[stage, adders[owner % len(adders)]][at] += lost[at]
        return came

    def _sent(self, values: Floats, key: tuple[int, int]) -> Floats:
        """What arrives of `values`, to which what was kept under `key` is added."""
        kept = self._kept.get(key, np.zeros_like(values))
        missing = np.signbit(values) & (values == 0)
        wanted = np.where(missing, values, values + kept + np.float32(0))
        came = np.where(missing, np.float32(-0.0), through_8_bits(wanted))
        if self._feeds_back:
            lost = wanted - came
            self._kept[key] = np.where(missing, kept, np.where(np.isfinite(lost), lost, np.float32(0)))
        return came


def through_8_bits(values: Floats) -> Floats:
    """`values` after a way in whole numbers from -127 to 127, with the scale of each block."""
    rows = np.pad(values, (0, -len(values) % BLOCK)).reshape(-1, BLOCK)
    scales = np.abs(rows).max(1, keepdims=True) / np.float32(127)
    with np.errstate(divide="ignore", invalid="ignore"):
        whole = np.rint(np.nan_to_num(rows / scales, nan=0.0, posinf=0.0, neginf=0.0)).clip(-127, 127)
    came: Floats = np.where(np.isfinite(scales), whole.astype(np.float32) * scales + np.float32(0), np.float32(np.nan))
    return came.reshape(-1)[: len(values)]
