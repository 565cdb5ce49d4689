"""The second tracer: torch.export, which runs the model's code on fake tensors."""

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch.export import Dim

from funcpipe.model.graph.program import attribute
from funcpipe.model.graph.scopes import replace_scopes
from funcpipe.model.graph.signature import batch_of
from funcpipe.model.graph.tracers import Traced, TraceRequest, flatten_output, innermost
from funcpipe.model.graph.tree import Tree


def trace_export(request: TraceRequest) -> Traced:
    """Export the model with a dynamic batch size; exceptions of its code or of the exporter are not caught."""
    example = request.examples[1]
    batch = batch_of(example)
    tensors = tuple(example[name] for name in request.signature.tensors)
    dynamic = tuple({0: Dim.DYNAMIC} if tensor.dim() > 0 and tensor.size(0) == batch else None for tensor in tensors)
    silenced = contextlib.redirect_stderr(io.StringIO())  # torch prints half a graph if export fails
    with _called_with_tensors(request) as output, silenced:
        program = torch.export.export(request.model, tensors, dynamic_shapes={"tensors": dynamic}, strict=False)
    exported = program.module(check_guards=False)
    replace_scopes(exported)
    graph = exported.graph
    modules = dict(request.model.named_modules(remove_duplicate=False))
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node, name in zip(placeholders, request.signature.tensors, strict=True):
        node.meta["input"] = name
    for node in graph.nodes:
        node.meta["call"] = innermost(node.meta.get("nn_module_stack") or {}, request, modules)
    (end,) = [node for node in graph.nodes if node.op == "output"]
    results = iter(end.args[0])
    leaves = tuple(next(results) if is_tensor else leaf for is_tensor, leaf in output.leaves)
    named = {**dict(request.model.named_parameters(remove_duplicate=False)), **dict(request.model.named_buffers())}
    targets = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    root = {target: named[target] if target in named else attribute(exported, target) for target in targets}
    graph.set_codegen(torch.fx.graph.CodeGen())
    return Traced(torch.fx.GraphModule(root, graph), leaves, output.tree, output.notes)


class _Output:
    """What the model returned: each leaf, and whether it is a tensor; their tree; notes on what was dropped."""

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
        output.leaves = tuple((isinstance(leaf, Tensor), leaf) for leaf in leaves)
        return tuple(leaf for is_tensor, leaf in output.leaves if is_tensor)

    vars(model)["forward"] = flat
    try:
        yield output
    finally:
        if own is None:
            del vars(model)["forward"]
        else:
            vars(model)["forward"] = own
