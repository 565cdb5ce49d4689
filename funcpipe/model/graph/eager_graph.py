"""The third tracer: runs the model's code as it is, for two batch sizes, and records its calls on tensors.

Modules of torch.nn and declared blocks become one node each, so their code does not matter. A number that differs
between the two runs must be a function of the batch size.
"""

from typing import Any

import torch
import torch.fx
from torch import Tensor

from funcpipe.model.graph.eager_tracer import EagerTracer, Entry
from funcpipe.model.graph.isolation import preserve_state, without_saved_tensors
from funcpipe.model.graph.program import Ref, is_number, map_leaves
from funcpipe.model.graph.signature import batch_of
from funcpipe.model.graph.tracers import Traced, TraceRequest, flatten_output
from funcpipe.model.graph.tree import Tree


class BatchDependent(Exception):
    """Runs of the model with different batch sizes made different calls."""


def trace_eager(request: TraceRequest) -> Traced:
    """Run the model twice and make a graph of its calls; exceptions of its code or of the tracer are not caught."""
    (one, tree, notes), (two, _, _) = (_record(request, i) for i in (0, 1))
    sizes = [batch_of(example) or 0 for example in request.examples]
    if len(one.entries) != len(two.entries):
        raise BatchDependent(
            f"the model makes {len(one.entries)} calls for {sizes[0]} samples, but {len(two.entries)} for {sizes[1]}"
        )
    builder = _GraphBuilder(request, one, sizes)
    for first, second in zip(one.entries, two.entries, strict=True):
        builder.add(first, second)
    outputs = tuple(builder.argument(a, b) for a, b in zip(one.outputs, two.outputs, strict=True))
    builder.graph.output(outputs)
    root = {**one.attributes, **{path: request.model.get_submodule(path) for path in one.modules}}
    return Traced(torch.fx.GraphModule(root, builder.graph), outputs, tree, notes)


def _record(request: TraceRequest, i: int) -> tuple[EagerTracer, Tree, tuple[str, ...]]:
    inputs = {name: tensor.clone() for name, tensor in request.examples[i].items()}
    tracer = EagerTracer(request, inputs)
    args, kwargs = request.signature.arguments(inputs)
    with preserve_state(request.model), without_saved_tensors(), tracer:
        output = request.model(*args, **kwargs)
        tracer.refuse_non_torch_randomness()
    leaves, tree, notes = flatten_output(output)
    tracer.outputs = [tracer.reference(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return tracer, tree, notes


class _GraphBuilder:
    """Builds a graph from the entries of two recordings."""

    def __init__(self, request: TraceRequest, tracer: EagerTracer, sizes: list[int]) -> None:
        self.graph = torch.fx.Graph()
        self.nodes: dict[str, torch.fx.Node] = {}
        self._sizes = sizes
        self._batched_input: torch.fx.Node | None = None
        for name in request.signature.tensors:
            node = self.graph.placeholder(name.replace(".", "_"))
            node.meta["input"] = name
            self.nodes[f"input:{name}"] = node
            shapes = [tuple(example[name].shape[:1]) for example in request.examples]
            if self._batched_input is None and shapes == [(size,) for size in sizes]:
                self._batched_input = node

    def add(self, one: Entry, two: Entry) -> None:
        """Add the node for the call that both runs made at this point; raises BatchDependent if the calls differ."""
        if (one.op, one.target, one.name) != (two.op, two.target, two.name):
            raise BatchDependent(
                f"the model calls {one.target} for {self._sizes[0]} samples, but {two.target} for {self._sizes[1]}"
            )
        args = self.argument(one.args, two.args)
        kwargs = self.argument(one.kwargs, two.kwargs)
        node = self.graph.create_node(one.op, one.target, tuple(args), dict(kwargs))
        node.meta["call"] = one.call
        node.meta["no_grad"] = one.no_grad
        self.nodes[one.name] = node

    def argument(self, one: Any, two: Any) -> Any:
        """The argument that was `one` in the first run and `two` in the second."""
        others: list[Any] = []
        map_leaves(two, lambda leaf: others.append(leaf))
        rest = iter(others)
        joined = map_leaves(one, lambda leaf: self._leaf(leaf, next(rest, Ref("nothing"))))
        if next(rest, None) is not None:
            raise BatchDependent(f"an argument is longer for {self._sizes[1]} samples than for {self._sizes[0]}")
        return joined

    def _leaf(self, one: Any, two: Any) -> Any:
        if isinstance(one, Ref) and one == two:
            return self.nodes[one.name]
        if one is two or (type(one) is type(two) and not isinstance(one, Ref) and bool(one == two)):
            return one
        if not (is_number(one) and is_number(two)) or self._batched_input is None:
            raise BatchDependent(f"{one!r} for {self._sizes[0]} samples becomes {two!r} for {self._sizes[1]}")
        batch = self.graph.call_method("size", (self._batched_input, 0))
        few, many = self._sizes
        slope = (two - one) / (many - few)
        if isinstance(one, int) and slope == int(slope):
            return self.graph.call_function(linear, (batch, int(slope), one - int(slope) * few))
        if one * few == two * many:
            return self.graph.call_function(reciprocal, (batch, one * few))
        return self.graph.call_function(linear, (batch, slope, one - slope * few))


def linear(batch: int, slope: float, offset: float) -> float:
    """A number that grows linearly with the batch size."""
    return batch * slope + offset


def reciprocal(batch: int, numerator: float) -> float:
    """A number that is inversely proportional to the batch size."""
    return numerator / batch
