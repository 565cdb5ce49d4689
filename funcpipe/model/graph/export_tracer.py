"""The second tracer: torch.export, which runs the model's code on fake tensors.

It makes one operator of all that code does under `torch.autocast` or `torch.no_grad`: the modules in it could not be
distinguished, and the operators load torch's compiler when they run, 80 MB and two seconds in a function. So these
regions are dissolved into the nodes around them.
"""

import contextlib
import io
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch._higher_order_ops.wrap import wrap_with_autocast, wrap_with_set_grad_enabled
from torch.export import Dim
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.overrides import TorchFunctionMode

from funcpipe.model.graph.node_functions import expect_number
from funcpipe.model.graph.patches import gradient_code_refused
from funcpipe.model.graph.program import Autocast, attribute, autocast_state, changed_autocast
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
    _dissolve_scopes(exported, no_grad=False, autocast=autocast_state())
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
    """The conditions that inputs must meet for the exporter's program to be right, by its own account.

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
    """The model's output: each leaf, and whether the graph computes it; their tree; notes on what was dropped."""

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


def _dissolve_scopes(module: torch.fx.GraphModule, *, no_grad: bool, autocast: Autocast) -> None:
    """Put the nodes of each region in its place, and note what holds at each node; outside, the given state holds."""
    for node in list(module.graph.nodes):
        if node.target is wrap_with_set_grad_enabled:
            enabled, region, *given = node.args
            _dissolve_scopes(_of(module, region), no_grad=not enabled, autocast=autocast)
        elif node.target is wrap_with_autocast:
            device, dtype, enabled, _, region, *given = node.args
            inside = changed_autocast(autocast, device, dtype, enabled=enabled)
            _dissolve_scopes(_of(module, region), no_grad=no_grad, autocast=inside)
        else:
            node.meta |= {"no_grad": no_grad, "autocast": autocast}
            continue
        _put_in_place(module.graph, node, region, _of(module, region).graph, given)
    module.recompile()


def _of(module: torch.fx.GraphModule, region: torch.fx.Node) -> torch.fx.GraphModule:
    found = module.get_submodule(str(region.target))
    assert isinstance(found, torch.fx.GraphModule), "torch makes a graph of each region"
    return found


def _put_in_place(
    outer: torch.fx.Graph, call: torch.fx.Node, region: torch.fx.Node, inner: torch.fx.Graph, given: list[Any]
) -> None:
    """Replace the node `call`, which runs `inner`, the graph of `region`, on `given`, by the nodes of that graph."""
    placeholders = [node for node in inner.nodes if node.op == "placeholder"]
    places: dict[torch.fx.Node, torch.fx.Node] = dict(zip(placeholders, given, strict=True))
    with outer.inserting_before(call):
        results = outer.graph_copy(inner, places)
    for node in inner.nodes:
        if node.op == "get_attr":
            places[node].target = f"{region.target}.{node.target}"
    assert isinstance(results, tuple), "torch makes each region return a tuple"
    for item in list(call.users):
        number: Any = item.args[1]
        item.replace_all_uses_with(results[number])
        outer.erase_node(item)
    outer.erase_node(call)
    if not region.users:
        outer.erase_node(region)
