"""Random numbers that do not depend on the plan, for datasets and for the plain model.

The generators are seeded anew for each sample, from (seed, epoch, index), and for each layer that draws random numbers,
from (seed, step, micro-batch, layer). So dropout and data augmentation do not depend on which function computes what.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn

from funcpipe.model.graph import LayerGraph
from funcpipe.model.seeds import layer_seed, reseed
from funcpipe.training.data import MapDataset


class SeededDataset:
    """`dataset`, with the generators seeded before each sample: within an epoch, a sample is always the same."""

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
    """Within this context, a forward of the plain `model` draws the random numbers that the stages of `graph` draw."""
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
