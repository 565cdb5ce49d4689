"""The seed of every layer's random numbers: a function of run, step, micro-batch and layer, never of the plan."""

import hashlib
import random
from collections.abc import Collection

import numpy as np
import torch


def layer_seed(seed: int, step: int, micro_batch: int, layer_name: str) -> int:
    """The seed of the random number generators at the start of a layer: the same under any plan and when recomputed."""
    text = f"{seed}/{step}/{micro_batch}/{layer_name}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def reseed(seed: int, generators: Collection[str] = ("torch",)) -> None:
    """Seed global generators: "torch" (of the CPU), "numpy" and "random"."""
    if "torch" in generators:
        torch.default_generator.manual_seed(seed)
    if "numpy" in generators:
        np.random.seed(seed % 2**32)
    if "random" in generators:
        random.seed(seed)
