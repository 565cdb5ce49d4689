"""The third tracer: runs the model's code as it is, for two batch sizes, and records its calls on tensors.

Modules of torch.nn and declared blocks become one node each, so their code does not matter. A number that differs
between the two runs must be a function of the batch size. Further runs, on inputs that are extreme in some way, must
make the very same calls.
"""

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import torch
import torch.fx
from torch import Tensor

from funcpipe.model.graph.eager_calls import DataDependent, Entry
from funcpipe.model.graph.eager_tracer import EagerTracer
from funcpipe.model.graph.isolation import forward_only, preserve_state
from funcpipe.model.graph.node_functions import linear, reciprocal
from funcpipe.model.graph.program import Ref, common_path, is_number, map_leaves
from funcpipe.model.graph.tracers import RecordedModule, Traced, TraceRequest, Unrecordable, flatten_output
from funcpipe.model.tensors import Tree


class BatchDependent(Unrecordable):
    """Runs of the model with different batch sizes made different calls."""


def trace_eager(request: TraceRequest) -> Traced:
    """Run the model and make a graph of its calls; exceptions of its code or of the tracer are not caught."""
    (one, tree, notes), (two, _, _) = (_record(request, example) for example in request.examples)
    sizes = request.samples
    builder = _GraphBuilder(request)
    _check_constants(one, two)
    for first, second in zip_longest(one.entries, two.entries):
        if first is None or second is None:
            counts = f"{len(one.entries)} calls for {sizes[0]} samples, but {len(two.entries)} for {sizes[1]}"
            raise BatchDependent(f"the model makes {counts}", *_blamed(first, second))
        builder.add(first, second)
    outputs = tuple(builder.argument(a, b) for a, b in zip(one.outputs, two.outputs, strict=True))
    builder.graph.output(outputs)
    for what, inputs in _extreme_inputs(request).items():
        _compare_calls(request, one, inputs, what)
    root = {**one.attributes, **{path: request.model.get_submodule(path) for path in one.modules}}
    fixed = {name: _same_sizes(request, name) for name in request.signature.tensors}
    return Traced(RecordedModule(root, builder.graph), outputs, tree, notes, fixed)


def _same_sizes(request: TraceRequest, name: str) -> list[int]:
    """The dimensions of an input that have one size in both examples, but for the batch."""
    one, two = (example[name].shape for example in request.examples)
    return [dim for dim in range(1 if request.is_batched(name) else 0, len(two)) if one[dim] == two[dim]]


def _extreme_inputs(request: TraceRequest) -> dict[str, dict[str, Tensor]]:
    """Inputs like those of the first example that code which depends on data is likely to treat in another way, by a
    description.
    """
    inputs = request.examples[0]
    batched = {name for name in inputs if request.is_batched(name)}
    numbers = {name for name, tensor in inputs.items() if tensor.is_floating_point() or tensor.is_complex()}
    changes: dict[str, Any] = {
        "inputs in another order, with the other sign": lambda name, t: (
            -t.flip(0) if name in numbers & batched else t.flip(0) if name in batched else t
        ),
        "samples that are all alike": lambda name, t: t[:1].expand_as(t).clone() if name in batched else t.clone(),
        "inputs of zeros": lambda name, t: torch.zeros_like(t),
        "large inputs": lambda name, t: 100 * t if name in numbers else t.amax().expand_as(t).clone(),
    }
    return {what: {name: change(name, t) for name, t in inputs.items()} for what, change in changes.items()}


def _record(request: TraceRequest, example: Mapping[str, Tensor]) -> tuple[EagerTracer, Tree, tuple[str, ...]]:
    inputs = {name: tensor.clone() for name, tensor in example.items()}
    tracer = EagerTracer(request, inputs)
    args, kwargs = request.signature.arguments(inputs)
    with preserve_state(request.model), forward_only(request.saves_tensors), tracer.recording():
        output = request.model(*args, **kwargs)
        tracer.refuse_non_torch_randomness()
    leaves, tree, notes = flatten_output(output)
    tracer.outputs = [tracer.reference(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return tracer, tree, notes


def _check_constants(one: EagerTracer, two: EagerTracer) -> None:
    """Raise DataDependent if a tensor that no recorded call made is not the same in both runs."""
    for name, tensor in one.attributes.items():
        other = two.attributes.get(name)
        if other is None or tensor is other:
            continue
        if tensor.shape != other.shape or tensor.dtype != other.dtype or not torch.equal(tensor, other):
            entry = next(entry for entry in one.entries if entry.op == "get_attr" and entry.target == name)
            raise DataDependent("a tensor is made by code that cannot be recorded", entry.path, entry.where)


def _compare_calls(request: TraceRequest, one: EagerTracer, inputs: Mapping[str, Tensor], what: str) -> None:
    """Raise DataDependent if the model makes other calls than in the run `one` for inputs of the same sizes, unless it
    refuses these inputs.
    """
    try:
        other, _, _ = _record(request, inputs)
    except Unrecordable:
        raise
    except Exception:  # noqa: BLE001 - a model may refuse inputs that are nothing like its data
        return
    _check_constants(one, other)
    for first, second in zip_longest(one.entries, other.entries):
        if first is None or second is None or not _same_call(first, second):
            raise DataDependent(f"the model makes other calls for {what}", *_blamed(first, second))


def _blamed(one: Entry | None, other: Entry | None) -> tuple[str, str]:
    """The path of the module whose code made two calls that should be the same, and the line of the first."""
    known = [entry for entry in (one, other) if entry is not None]
    return common_path(*(entry.path for entry in known)), known[0].where


def _same_call(one: Entry, other: Entry) -> bool:
    if (one.op, one.target, one.name) != (other.op, other.target, other.name):
        return False
    ours: list[Any] = []
    map_leaves((one.args, one.kwargs), lambda leaf: ours.append(leaf))
    theirs: list[Any] = []
    map_leaves((other.args, other.kwargs), lambda leaf: theirs.append(leaf))
    return len(ours) == len(theirs) and all(_same(a, b) for a, b in zip(ours, theirs, strict=True))


def _same(one: Any, other: Any) -> bool:
    """Return whether two arguments are the same constant, or refer to the same call; a NaN equals a NaN."""
    if one is other:
        return True
    return type(one) is type(other) and (bool(one == other) or (one != one and other != other))


class _GraphBuilder:
    def __init__(self, request: TraceRequest) -> None:
        self.graph = torch.fx.Graph()
        self.nodes: dict[str, torch.fx.Node] = {}
        self._sizes = request.samples
        self._batched_input: torch.fx.Node | None = None
        self._free: dict[tuple[int, int], tuple[torch.fx.Node, int]] = {}  # sizes of the inputs that differ
        for name in request.signature.tensors:
            node = self.graph.placeholder(name.replace(".", "_"))
            node.meta["input"] = name
            self.nodes[f"input:{name}"] = node
            if self._batched_input is None and request.is_batched(name):
                self._batched_input = node
            for dim, pair in enumerate(zip(*(example[name].shape for example in request.examples), strict=True)):
                if pair[0] != pair[1]:
                    self._free.setdefault(pair, (node, dim))

    def add(self, one: Entry, two: Entry) -> None:
        """Add the node for the call that both runs made at this point; raises BatchDependent if the calls differ."""
        if (one.op, one.target, one.name) != (two.op, two.target, two.name):
            calls = f"{_title(one)} for {self._sizes[0]} samples, but {_title(two)} for {self._sizes[1]}"
            raise BatchDependent(f"the model calls {calls}", *_blamed(one, two))
        try:
            args = self.argument(one.args, two.args)
            kwargs = self.argument(one.kwargs, two.kwargs)
        except BatchDependent as error:
            raise BatchDependent(str(error), *_blamed(one, two)) from None
        node = self.graph.create_node(one.op, one.target, tuple(args), dict(kwargs))
        node.meta["call"] = one.call
        node.meta["path"] = one.path
        node.meta["no_grad"] = one.no_grad
        node.meta["autocast"] = one.autocast
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
        if not isinstance(one, Ref) and _same(one, two):
            return one
        size = self._free.get((one, two)) if type(one) is type(two) is int else None
        if size is not None:
            return self.graph.call_method("size", size)
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


def _title(entry: Entry) -> str:
    return str(getattr(entry.target, "__name__", entry.target))
