"""The second tracer: torch.export, which runs the model's code on fake tensors."""

import contextlib
import io
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch.export import Dim
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.overrides import TorchFunctionMode

from funcpipe.model.graph.expectations import expect_number
from funcpipe.model.graph.gradient_code import gradient_code_refused
from funcpipe.model.graph.program import attribute
from funcpipe.model.graph.scopes import dissolve_scopes
from funcpipe.model.graph.tracers import (
    SYMBOLIC,
    LengthsFixed,
    TooSlow,
    Traced,
    TraceRequest,
    flatten_output,
    innermost,
)
from funcpipe.model.tensors import Tree

LIMIT_S = 60.0
"""Processor seconds for an export: where sizes depend on many others, a condition on them can take seconds to solve."""


def trace_export(request: TraceRequest) -> Traced:
    """Export the model with dynamic sizes; exceptions of its code or of the exporter are not caught.

    Raises TooSlow if that takes longer than `LIMIT_S`.
    """
    tensors = tuple(request.examples[1][name] for name in request.signature.tensors)
    dynamic = {"tensors": tuple(_free_dimensions(request, name) for name in request.signature.tensors)}
    silenced = contextlib.redirect_stderr(io.StringIO())  # torch prints half a graph if export fails
    with _called_with_tensors(request) as output, silenced, gradient_code_refused(), _Limited():
        program = torch.export.export(request.model, tensors, dynamic_shapes=dynamic, strict=False)
    exported = program.module(check_guards=False)
    dissolve_scopes(exported)
    graph = exported.graph
    modules = dict(request.model.named_modules(remove_duplicate=False))
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node, name in zip(placeholders, request.signature.tensors, strict=True):
        node.meta["input"] = name
    shapes = {node.meta["input"]: node.meta["val"].shape for node in placeholders}
    fixed = {name: [i for i, size in enumerate(shape) if isinstance(size, int)] for name, shape in shapes.items()}
    _check_free(request, fixed)
    for node in graph.nodes:
        node.meta["call"] = innermost(node.meta.get("nn_module_stack") or {}, request, modules)
        node.meta["data_sized"] = bool(free_unbacked_symbols(node.meta.get("val")))
        if node.target is torch.ops.aten._assert_scalar.default and isinstance(node.args[0], torch.fx.Node):
            node.target, node.args = expect_number, (node.args[0], "", f"code ({node.args[1]})", True)
    (end,) = [node for node in graph.nodes if node.op == "output"]
    results = iter(end.args[0])
    leaves = tuple(next(results) if computed else leaf for computed, leaf in output.leaves)
    named: dict[str, Tensor] = dict(request.model.named_parameters(remove_duplicate=False))
    named |= dict(request.model.named_buffers(remove_duplicate=False))
    targets = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    root = {target: named[target] if target in named else attribute(exported, target) for target in targets}
    graph.set_codegen(torch.fx.graph.CodeGen())
    guards = _guards(request, program._guards_code, fixed)
    return Traced(torch.fx.GraphModule(root, graph), leaves, output.tree, output.notes, fixed, guards)


class _Limited(TorchFunctionMode):
    """Ends an export that takes too long, at the next function of torch that is called."""

    def __init__(self) -> None:
        super().__init__()
        self._began_s = time.thread_time()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if time.thread_time() - self._began_s > LIMIT_S:
            raise TooSlow(f"the export takes longer than {LIMIT_S:g} s of a processor")
        return func(*args, **(kwargs or {}))


def _free_dimensions(request: TraceRequest, name: str) -> dict[int, Any]:
    """The dimensions of an input that the exported program shall follow: the batch, and those that differ in the
    examples.
    """
    one, two = (example[name] for example in request.examples)
    free = {dim: Dim.AUTO for dim in range(two.dim()) if one.size(dim) != two.size(dim)}
    return {**free, 0: Dim.DYNAMIC} if request.is_batched(name) else free


def _check_free(request: TraceRequest, fixed: Mapping[str, Sequence[int]]) -> None:
    """Raise LengthsFixed if the exporter has fixed a size that differs in the examples."""
    one, two = request.examples
    for name, dims in fixed.items():
        for dim in dims:
            if one[name].size(dim) != two[name].size(dim):
                raise LengthsFixed(
                    f"the exported program is for inputs {name} of the length {two[name].size(dim)} only"
                )


def _guards(request: TraceRequest, code: Sequence[str], fixed: Mapping[str, Sequence[int]]) -> tuple[str, ...]:
    """What the exporter has found out that inputs must satisfy for its program to be right.

    It takes for granted that free sizes are at least two.
    """
    names = request.signature.tensors
    conditions = [
        re.sub(r"L\['tensors'\]\[(\d+)\]\.size\(\)", lambda found: f"sizes[{names[int(found[1])]!r}]", condition)
        for condition in code
    ]
    example = request.examples[1]
    free = [(name, dim) for name in names for dim in range(example[name].dim()) if dim not in fixed[name]]
    conditions += [f"sizes[{name!r}][{dim}] >= 2" for name, dim in free]
    return tuple(conditions)


class _Output:
    """What the model returned: each leaf, and whether the graph computes it; their tree; notes on what was dropped."""

    leaves: tuple[tuple[bool, Any], ...] = ()
    tree = Tree()
    notes: tuple[str, ...] = ()


@contextlib.contextmanager
def _called_with_tensors(request: TraceRequest) -> Iterator[_Output]:
    """Have the model take its tensor inputs in order and return only the tensors of its output."""
    model, output = request.model, _Output()
    forward, own = model.forward, vars(model).get("forward")

    def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = request.signature.arguments(dict(zip(request.signature.tensors, tensors, strict=True)))
        leaves, output.tree, output.notes = flatten_output(forward(*args, **kwargs))
        output.leaves = tuple((isinstance(leaf, (Tensor, *SYMBOLIC)), leaf) for leaf in leaves)
        return tuple(leaf for computed, leaf in output.leaves if computed)

    vars(model)["forward"] = flat
    try:
        yield output
    finally:
        if own is None:
            del vars(model)["forward"]
        else:
            vars(model)["forward"] = own
