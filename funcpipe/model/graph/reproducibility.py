"""Find where a model does something else when it is run again on the same inputs and seeds."""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from funcpipe.model.graph.source_location import current_line
from funcpipe.model.graph.tree import flatten


class _Results(TorchFunctionMode):
    """Keeps the results of all calls of torch's functions, but `ignored` tensors, with the lines that made them."""

    def __init__(self, ignored: Sequence[Tensor]) -> None:
        super().__init__()
        self._ignored = {id(tensor) for tensor in ignored}
        self.found: list[tuple[str, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        where = current_line()
        leaves = flatten(result)[0]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in self._ignored]
        self.found += [(where, tensor.detach().clone()) for tensor in tensors]
        return result


def first_difference(
    run: Callable[[], Any], prepare: Callable[[], None] = lambda: None, ignored: Sequence[Tensor] = ()
) -> str | None:
    """The line whose result differs first when `run`, which seeds what it does, is called twice; None if none does.

    `prepare` is called before each; what it computes does not count, nor do results that are one of the `ignored`.
    """
    results = []
    for _ in range(2):
        prepare()
        with _Results(ignored) as mode:
            run()
        results.append(mode.found)
    for one, other in zip_longest(*results):
        if one is None or other is None or one[0] != other[0] or not _equal(one[1], other[1]):
            where: str = (one or other)[0]
            return where
    return None


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())
