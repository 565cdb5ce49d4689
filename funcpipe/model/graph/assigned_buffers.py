"""Buffers that a forward assigns anew, `self.mean = 0.9 * self.mean + …`: a graph has no node for that."""

from collections.abc import Sequence

from funcpipe.model.graph.attribute_access import watched_attributes
from funcpipe.model.graph.equivalence import Example
from funcpipe.model.graph.isolation import forward_only, preserve_state
from funcpipe.model.graph.python_state import Slot
from funcpipe.model.graph.tracers import TraceRequest

ASSIGNS = "assigns the buffer"
"""What `first_assigned` says of a module."""


def first_assigned(request: TraceRequest, one: Example, buffers: Sequence[str]) -> tuple[str, str] | None:
    """The path of a module whose buffer the model assigns, of those that `buffers` names, and a text that says where.

    The innermost one comes first. None if they are changed in other ways.
    """
    slots = [Slot(*name.rpartition(".")[::2]) for name in buffers]
    args, kwargs = request.signature.arguments({name: tensor.clone() for name, tensor in one.inputs.items()})
    with (
        preserve_state(request.model),
        forward_only(one.saves_tensors),
        watched_attributes(request.model, slots) as accesses,
    ):
        request.model(*args, **kwargs)
    for slot in sorted(slots, key=lambda slot: -slot.path.count(".") if slot.path else 1):
        lines = [access.line for access in accesses[slot] if not access.is_read]
        if lines:
            owner = type(request.model.get_submodule(slot.path)).__name__
            title = f"{slot.path} ({owner})" if slot.path else owner
            return slot.path, (
                f"{title} {ASSIGNS} {slot.attribute} ({lines[0]}), which a graph cannot repeat; "
                f"what changes it in place, such as self.{slot.attribute}.copy_(…), can be recorded"
            )
    return None
