"""The second route from a model to a graph: torch.export, which runs the model's code on fake tensors."""

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
from funcpipe.model.graph.tracers import Traced, TraceTask, innermost, take_output_apart
from funcpipe.model.graph.tree import Tree


def trace_export(task: TraceTask) -> Traced:
    """Export the model with an open batch size; whatever its code or the exporter raises comes through."""
    example = task.examples[1]
    batch = batch_of(example)
    tensors = tuple(example[name] for name in task.signature.tensors)
    free = tuple({0: Dim.DYNAMIC} if tensor.dim() > 0 and tensor.size(0) == batch else None for tensor in tensors)
    quiet = contextlib.redirect_stderr(io.StringIO())  # where torch prints half a graph when the other half fails
    with _called_with_tensors(task) as output, quiet:
        program = torch.export.export(task.model, tensors, dynamic_shapes={"tensors": free}, strict=False)
    exported = program.module(check_guards=False)
    replace_scopes(exported)
    graph = exported.graph
    modules = dict(task.model.named_modules(remove_duplicate=False))
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node, name in zip(placeholders, task.signature.tensors, strict=True):
        node.meta["input"] = name
    for node in graph.nodes:
        node.meta["call"] = innermost(node.meta.get("nn_module_stack") or {}, task, modules)
    (end,) = [node for node in graph.nodes if node.op == "output"]
    results = iter(end.args[0])
    leaves = tuple(next(results) if moves else leaf for moves, leaf in output.leaves)
    named = {**dict(task.model.named_parameters(remove_duplicate=False)), **dict(task.model.named_buffers())}
    targets = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    root = {target: named[target] if target in named else attribute(exported, target) for target in targets}
    graph.set_codegen(torch.fx.graph.CodeGen())
    return Traced(torch.fx.GraphModule(root, graph), leaves, output.tree, output.notes)


class _Output:
    """What the model returned: of each leaf whether it is a tensor, and the leaf; their tree; what was left out."""

    leaves: tuple[tuple[bool, Any], ...] = ()
    tree = Tree()
    notes: tuple[str, ...] = ()


@contextlib.contextmanager
def _called_with_tensors(task: TraceTask) -> Iterator[_Output]:
    """Let the model take its tensor inputs in order and return the tensors of its output; the rest is kept aside."""
    model, output = task.model, _Output()
    forward, own = model.forward, vars(model).get("forward")

    def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = task.signature.arguments(dict(zip(task.signature.tensors, tensors, strict=True)))
        leaves, output.tree, output.notes = take_output_apart(forward(*args, **kwargs))
        output.leaves = tuple((isinstance(leaf, Tensor), leaf) for leaf in leaves)
        return tuple(leaf for moves, leaf in output.leaves if moves)

    vars(model)["forward"] = flat
    try:
        yield output
    finally:
        if own is None:
            del vars(model)["forward"]
        else:
            vars(model)["forward"] = own
