"""Random numbers that do not depend on the plan, for datasets, losses and the plain model.

The generators are seeded anew for each sample, from (seed, epoch, index), and for each call of the model that draws
random numbers and for the loss, from (seed, step, micro-batch, name). So dropout, noise and data augmentation do not
depend on which function computes what.
"""

from collections import Counter
from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from funcpipe.model.draws import SHARED_GENERATORS, DrawingOperators, layer_seed, module_draw, operator_draw, reseed
from funcpipe.model.graph import LayerGraph
from funcpipe.model.graph.program import WHOLE
from funcpipe.training.data import Collate, LoadedBatch, MapDataset, collated, is_default_collate
from funcpipe.training.tensor_table import TensorTable

_ALL = ("torch", "numpy", "random")


class SeededDataset:
    """`dataset`, with the generators seeded before each sample: within an epoch, a sample is always the same.

    Samples that are tensors in memory draw nothing, and leave the generators to others.
    """

    def __init__(self, dataset: MapDataset, seed: int, epoch: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self._epoch = epoch
        self._draws = type(dataset) not in (TensorDataset, TensorTable)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        if not self._draws:
            return self._dataset[index]
        with SHARED_GENERATORS.loading():
            reseed(layer_seed(self._seed, self._epoch, index, "sample"), _ALL)
            return self._dataset[index]

    def batch(self, indices: Sequence[int], collate: Collate | None = None) -> LoadedBatch:
        """Return the samples at `indices` as one batch, made by `collate` or as torch does without one.

        The generators are seeded for `collate` too, from the first of the samples. Raises DataError for samples or
        batches that have no inputs and target.
        """
        samples = [self[index] for index in indices]
        if is_default_collate(collate):
            return collated(samples, indices, collate)
        with SHARED_GENERATORS.loading():
            reseed(layer_seed(self._seed, self._epoch, indices[0], "batch"), _ALL)
            return collated(samples, indices, collate)


def seed_loss(seed: int, step: int, micro_batch: int) -> None:
    """Seed the generators for the loss function."""
    reseed(layer_seed(seed, step, micro_batch, "loss"), _ALL)


def seeded(model: nn.Module, graph: LayerGraph, seed: int, step: int, micro_batch: int) -> "SeededModel":
    """Within this context, one forward of the plain `model` draws the random numbers that the stages of `graph` draw.

    Enter it again for the backward if the model recomputes parts of its forward there (torch.utils.checkpoint).
    """
    return SeededModel(model, graph, (seed, step, micro_batch))


class SeededModel(DrawingOperators):
    """Seeds the draws of a plain model as its traced graph does.

    Operators are looked at only if some draw outside of modules that are one node: below a dispatch mode autograd adds
    gradients up differently, with other strides, and kernels of torch may then give other results.

    torch's generator holds the seed that it was last given, also when a checkpoint has put it back to where a region of
    the forward began. So that seed says which draws have been before, and a region that is computed again draws the
    same numbers.
    """

    def __init__(self, model: nn.Module, graph: LayerGraph, seed: tuple[int, int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._seed = seed
        nodes = list(graph.module.graph.nodes)
        drawing = [node for node in nodes if "draws" in node.meta]
        self._has_drawing_operators = any(node.op != "call_module" for node in drawing)
        self._paths = dict.fromkeys(str(node.target) for node in nodes if node.op == "call_module")
        draws = [node.meta["draws"] for node in drawing if node.op == "call_module"]
        self._generators = {name: item.generators for item in draws for name in item.names}
        self._calls: Counter[str] = Counter()  # draws and calls of modules so far, by path; "" for draws outside those
        self._calls_at: dict[int, Counter[str]] = {}  # the same at the time when torch's generator had some seed
        self._handles: list[Any] = []
        self._inside = 0
        self._seeds_inside: set[int] = set()  # of modules that are one node, while they run

    def __enter__(self) -> "SeededModel":
        if not self._calls_at:
            self._go_on("forward", self._calls)
        modules = {**dict(self._model.named_modules(remove_duplicate=False)), WHOLE: self._model}
        for path in self._paths:
            self._handles += [
                modules[path].register_forward_pre_hook(self._entry(path), prepend=True),
                modules[path].register_forward_hook(self._leave, always_call=True),
            ]
        if self._has_drawing_operators:
            super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        if self._has_drawing_operators:
            super().__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def before(self) -> None:
        """Seed the draw of an operator outside of modules that are one node."""
        if not self._is_inside():
            calls = self._position()
            self._go_on(operator_draw(calls[""] + 1), calls)

    def drawn(self) -> None:
        """Count it."""
        if not self._is_inside():
            self._calls = self._calls_at[torch.initial_seed()] = self._position() + Counter([""])

    def _entry(self, path: str) -> Any:
        def before(module: nn.Module, args: Any) -> None:
            if not self._inside:
                calls = self._position() + Counter([path])
                name = module_draw(path, calls[path])
                self._go_on(name, calls, self._generators.get(name, frozenset()))
                self._seeds_inside.add(torch.initial_seed())
            self._inside += 1

        return before

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside -= 1
        if not self._inside:
            self._go_on(f"after {torch.initial_seed()}", self._position())

    def _is_inside(self) -> bool:
        """Return True if a module that is one node is running, or a checkpoint inside it computes part of it again."""
        return bool(self._inside) or torch.initial_seed() in self._seeds_inside

    def _position(self) -> Counter[str]:
        return self._calls_at.get(torch.initial_seed(), self._calls)

    def _go_on(self, name: str, calls: Counter[str], generators: Set[str] = frozenset()) -> None:
        seed = layer_seed(*self._seed, name)
        reseed(seed, {"torch", *generators})
        self._calls = self._calls_at[seed] = calls
