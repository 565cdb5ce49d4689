"""Blocks: modules that run as they are, as one layer each, because their code cannot be recorded.

Such code may be a buffer that a forward assigns anew, `self.mean = 0.9 * self.mean + …`: a graph has no node for that.
In the end the model itself becomes one block.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from funcpipe.model.graph.equivalence import Example
from funcpipe.model.graph.isolation import forward_only, preserve_state
from funcpipe.model.graph.program import WHOLE, WholeModel, is_inside
from funcpipe.model.graph.python_state import Slot
from funcpipe.model.graph.reachable import parts
from funcpipe.model.graph.state_access import watched_attributes
from funcpipe.model.graph.tracers import RecordedModule, Traced, TraceRequest
from funcpipe.model.graph.user_code import title_of
from funcpipe.model.graph.values import LayerGraph
from funcpipe.model.tensors import LEAF


def next_blocks(request: TraceRequest, path: str | None) -> frozenset[str]:
    """The modules to make blocks after code of the module at `path` (None: somewhere) could not be recorded.

    These are the innermost module that is no block yet, and all others of its class, which would fail too; in the end
    the model itself, whose path is empty. Nothing is left if that was tried.
    """
    modules = dict(request.model.named_modules())
    if "" in request.blocks:
        return frozenset()
    while path and (_is_within(path, request.blocks) or not _is_called(modules[path])):
        path = path.rpartition(".")[0]
    if not path:
        return frozenset({""})
    kind = type(modules[path])
    alike = {name for name, module in modules.items() if name and type(module) is kind}
    return frozenset(alike | {path}) - request.blocks


def _is_within(path: str, blocks: frozenset[str]) -> bool:
    return any(is_inside(path, block) for block in blocks)


def _is_called(module: nn.Module) -> bool:
    """Return whether the module has a forward of its own, unlike lists of modules."""
    return type(module).forward is not nn.Module.forward


def closed_blocks(model: nn.Module, blocks: Iterable[str]) -> frozenset[str]:
    """`blocks`, and around each that reaches parameters of modules outside itself, the modules around it up to one that
    reaches no others: as a layer of its own, a block would use a copy of them.
    """
    modules = dict(model.named_modules())
    known = {id(tensor) for tensor in model.parameters()}
    found = set(blocks)
    for path in blocks:
        while path and not _reached(modules[path]) & known <= {id(tensor) for tensor in modules[path].parameters()}:
            path = path.rpartition(".")[0]
            found.add(path)
    return frozenset(found)


def _reached(module: nn.Module) -> set[int]:
    """The identities of all that attributes of `module` and of what they hold lead to."""
    found: dict[int, Any] = {}
    left: list[Any] = [module]
    while left:
        value = left.pop()
        if id(value) not in found:
            found[id(value)] = value
            left += parts(value)
    return set(found)


ASSIGNS = "assigns the buffer"
"""The words by which a text of `first_assigned` is recognised."""


def first_assigned(request: TraceRequest, one: Example, buffers: Sequence[str]) -> tuple[str, str] | None:
    """The path of a module whose buffer the model assigns, of those that `buffers` names, and a text that says where.

    The innermost one comes first. None if they are changed in other ways.
    """
    slots = [Slot(*name.rpartition(".")[::2]) for name in buffers]
    with (
        preserve_state(request.model),
        forward_only(one.saves_tensors),
        watched_attributes(request.model, slots) as accesses,
    ):
        request.signature.call(request.model, one.inputs)
    for slot in sorted(slots, key=lambda slot: -slot.path.count(".") if slot.path else 1):
        lines = [access.line for access in accesses[slot] if not access.is_read]
        if lines:
            return slot.path, (
                f"{title_of(request.model, slot.path)} {ASSIGNS} {slot.attribute} ({lines[0]}), which a graph cannot "
                f"repeat; what changes it in place, such as self.{slot.attribute}.copy_(…), can be recorded"
            )
    return None


def block_notes(model: nn.Module, reasons: Mapping[frozenset[str], str]) -> tuple[str, ...]:
    """Notes on the modules that became blocks, without those that lie inside others, and the reasons."""
    if frozenset({""}) in reasons:
        return (
            f"{type(model).__name__} runs whole, as one layer: {reasons[frozenset({''})]}. To divide it, "
            "move the code of that line into a submodule, which then runs as one block",
        )
    everything = frozenset[str]().union(*reasons)
    notes = []
    for blocks, reason in reasons.items():
        outer = sorted(path for path in blocks if not _is_within(path.rpartition(".")[0], everything))
        if outer:
            notes.append(f"kept as one block each: {', '.join(outer)}: {reason}")
    return tuple(notes)


def one_layer_note(graph: LayerGraph) -> tuple[str, ...]:
    """A note on why a model ended in one layer, and what would help; none if it runs whole: `block_notes` has that."""
    if len(graph.layers) > 1 or "" in graph.blocks:
        return ()
    inside = {node.meta["call"][0] for node in graph.layers[0].nodes if node.meta.get("call")}
    assigned = [attempt.failure for attempt in graph.attempts if attempt.failure and ASSIGNS in attempt.failure]
    if assigned:
        why = assigned[0]
    elif len(inside) > 1:
        why = "its modules write to the memory or the buffers of each other; without that it could be divided"
    else:
        only = f"all it calls is {inside.pop()}" if inside else "it calls no modules and reads few parameters"
        why = f"{only}; layers begin at calls of modules, so move parts of its code into submodules to divide it"
    return (f"{graph.name} is one layer: {why}",)


def trace_whole(request: TraceRequest) -> Traced:
    """A graph with the model as its only node."""
    graph = torch.fx.Graph()
    inputs = []
    for name in request.signature.tensors:
        node = graph.placeholder(name.replace(".", "_"))
        node.meta["input"] = name
        inputs.append(node)
    output = graph.call_module(WHOLE, tuple(inputs))
    graph.output((output,))
    module = RecordedModule({WHOLE: WholeModel(request.model, request.signature)}, graph)
    return Traced(module, (output,), LEAF)
