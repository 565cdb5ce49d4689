"""The third route from a model to a graph: its code runs as it is, and what it calls on tensors is written down.

Modules of torch.nn and declared blocks are left whole, so that what is inside them does not matter. The code runs for
two batch sizes; where a number differs between the two, it must follow from the batch size.
"""

from typing import Any

import torch
import torch.fx
from torch import Tensor

from funcpipe.model.graph.eager_tracer import EagerTracer, Entry
from funcpipe.model.graph.isolation import nothing_saved, untouched
from funcpipe.model.graph.program import Ref, map_leaves
from funcpipe.model.graph.signature import batch_of
from funcpipe.model.graph.tracers import Traced, TraceTask, take_output_apart
from funcpipe.model.graph.tree import Tree


class Unlike(Exception):
    """Two runs of the model for different batch sizes did different things."""


def trace_eagerly(task: TraceTask) -> Traced:
    """Run the model twice and write down the calls; whatever its code or the recorder raises comes through."""
    (one, tree, notes), (two, _, _) = (_recorded(task, i) for i in (0, 1))
    sizes = [batch_of(example) or 0 for example in task.examples]
    if len(one.entries) != len(two.entries):
        raise Unlike(
            f"the model calls {len(one.entries)} operations for {sizes[0]} samples, {len(two.entries)} for {sizes[1]}"
        )
    graph = _Writer(task, one, sizes)
    for first, second in zip(one.entries, two.entries, strict=True):
        graph.write(first, second)
    outputs = tuple(graph.argument(a, b) for a, b in zip(one.outputs, two.outputs, strict=True))
    graph.graph.output(outputs)
    root = {**one.attributes, **{path: task.model.get_submodule(path) for path in one.modules}}
    return Traced(torch.fx.GraphModule(root, graph.graph), outputs, tree, notes)


def _recorded(task: TraceTask, i: int) -> tuple[EagerTracer, Tree, tuple[str, ...]]:
    inputs = {name: tensor.clone() for name, tensor in task.examples[i].items()}
    recorder = EagerTracer(task, inputs)
    args, kwargs = task.signature.arguments(inputs)
    with untouched(task.model), nothing_saved(), recorder:
        output = task.model(*args, **kwargs)
        recorder.refuse_foreign_draws()
    leaves, tree, notes = take_output_apart(output)
    recorder.outputs = [recorder.reference(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return recorder, tree, notes


class _Writer:
    """Writes a graph from the entries of two recordings."""

    def __init__(self, task: TraceTask, recorder: EagerTracer, sizes: list[int]) -> None:
        self.graph = torch.fx.Graph()
        self.nodes: dict[str, torch.fx.Node] = {}
        self._sizes = sizes
        self._batched: torch.fx.Node | None = None
        for name in task.signature.tensors:
            node = self.graph.placeholder(name.replace(".", "_"))
            node.meta["input"] = name
            self.nodes[f"input:{name}"] = node
            shapes = [tuple(example[name].shape[:1]) for example in task.examples]
            if self._batched is None and shapes == [(size,) for size in sizes]:
                self._batched = node

    def write(self, one: Entry, two: Entry) -> None:
        """Add the node for what both runs did at this point; raises Unlike where they did not do the same."""
        if (one.op, one.target, one.name) != (two.op, two.target, two.name):
            raise Unlike(
                f"for {self._sizes[0]} samples the model calls {one.target}, for {self._sizes[1]} {two.target}"
            )
        args = self.argument(one.args, two.args)
        kwargs = self.argument(one.kwargs, two.kwargs)
        node = self.graph.create_node(one.op, one.target, tuple(args), dict(kwargs))
        node.meta["call"] = one.call
        node.meta["no_grad"] = one.no_grad
        self.nodes[one.name] = node

    def argument(self, one: Any, two: Any) -> Any:
        """The argument that is `one` in the first run and `two` in the second."""
        others: list[Any] = []
        map_leaves(two, lambda leaf: others.append(leaf))
        rest = iter(others)
        joined = map_leaves(one, lambda leaf: self._leaf(leaf, next(rest, Ref("nothing"))))
        if next(rest, None) is not None:
            raise Unlike(f"an argument is longer for {self._sizes[1]} samples than for {self._sizes[0]}")
        return joined

    def _leaf(self, one: Any, two: Any) -> Any:
        if isinstance(one, Ref) and one == two:
            return self.nodes[one.name]
        numbers = isinstance(one, int | float) and isinstance(two, int | float)
        if one is two or (type(one) is type(two) and not isinstance(one, Ref) and bool(one == two)):
            return one
        if not numbers or self._batched is None:
            raise Unlike(f"{one!r} for {self._sizes[0]} samples is {two!r} for {self._sizes[1]}")
        batch = self.graph.call_method("size", (self._batched, 0))
        few, many = self._sizes
        slope = (two - one) / (many - few)
        if isinstance(one, int) and slope == int(slope):
            return self.graph.call_function(straight, (batch, int(slope), one - int(slope) * few))
        if one * few == two * many:
            return self.graph.call_function(inverse, (batch, one * few))
        return self.graph.call_function(straight, (batch, slope, one - slope * few))


def straight(batch: int, slope: float, offset: float) -> float:
    """A number that grows with the batch size."""
    return batch * slope + offset


def inverse(batch: int, numerator: float) -> float:
    """A number that is divided by the batch size."""
    return numerator / batch
