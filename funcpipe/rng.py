"""Random numbers that do not depend on the plan: a seed for each (run, step, micro-batch, layer)."""

import contextlib
import hashlib
import random
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from funcpipe.data import MapDataset
from funcpipe.graph import LayerGraph


def layer_seed(seed: int, step: int, micro_batch: int, layer_name: str) -> int:
    """The seed of torch's default generator at the start of a layer: the same under any plan, and when computed
    again.
    """
    text = f"{seed}/{step}/{micro_batch}/{layer_name}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def reseed(seed: int, generators: Collection[str] = ("torch",)) -> None:
    """Set generators to `seed`: torch's default one of the CPU; "numpy" and "random", the global ones of these
    modules.
    """
    if "torch" in generators:
        torch.default_generator.manual_seed(seed)
    if "numpy" in generators:
        np.random.seed(seed % 2**32)
    if "random" in generators:
        random.seed(seed)


class Reseeded:
    """`dataset` whose samples draw the same random numbers whenever they are made in the same epoch."""

    def __init__(self, dataset: MapDataset, seed: int, epoch: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        reseed(layer_seed(self._seed, self._epoch, index, "sample"), ("torch", "numpy", "random"))
        return self._dataset[index]


@contextlib.contextmanager
def seeded(model: nn.Module, graph: LayerGraph, seed: int, step: int, micro_batch: int) -> Iterator[None]:
    """Within the context a forward of the plain `model` draws the random numbers that the stages of `graph` draw."""
    draws = {layer.name: layer.draws for layer in graph.layers if layer.draws}
    calls: Counter[str] = Counter()
    hooks = []

    def hook(path: str) -> Any:
        def before(module: nn.Module, args: Any) -> None:
            calls[path] += 1
            name = path if calls[path] == 1 else f"{path}#{calls[path]}"
            if name in draws:
                reseed(layer_seed(seed, step, micro_batch, name), draws[name])

        return before

    paths = {name.partition("#")[0] for name in draws}
    modules = {**dict(model.named_modules(remove_duplicate=False)), graph.name: model}
    try:
        for path in paths:
            hooks.append(modules[path].register_forward_pre_hook(hook(path), prepend=True))
        yield
    finally:
        for handle in hooks:
            handle.remove()
