"""Find the state that a forward of a model leaves for the next one: attributes that a graph would freeze, and buffers.

The model runs on one batch, and then on another; and on that other batch alone. What differs between the two ways, in
its attributes afterwards or in its results, follows from what the first forward left. Attributes that every forward
writes anew (a mask, the last attention), or that the first one fills and no later one changes (a cache, hooks), come
out the same in both ways: a graph, which always starts from the attributes' first values, is right about them.
"""

import contextlib
import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from funcpipe.errors import ModelError
from funcpipe.model.draws import GENERATORS, reseed
from funcpipe.model.graph.equivalence import Example, example
from funcpipe.model.graph.inputs import InputBatches, Signature
from funcpipe.model.graph.isolation import forward_only, preserve_state
from funcpipe.model.graph.observations import Observation, difference_of
from funcpipe.model.graph.program import common_path, is_inside
from funcpipe.model.graph.python_state import Nested, Slot, State, why_not_plain
from funcpipe.model.graph.reachable import DEPTH, parts
from funcpipe.model.graph.state_access import Access, refuse_changing_globals, watched_attributes
from funcpipe.model.graph.user_code import title_of
from funcpipe.model.graph.values import Carried

_WAY_OUT = (
    "keep it as a buffer (register_buffer) that the forward changes in place, put the code that uses it into a "
    "submodule of its own, whose attributes stay with its stage, or compute it outside the forward"
)


_SEED = 7


@dataclass(frozen=True)
class _Context:
    """A model, how it is called, the values of its attributes before any run, and its own results."""

    model: nn.Module
    signature: Signature
    start: State
    examples: Sequence[Example]
    batches: InputBatches

    @property
    def other_inputs(self) -> dict[str, Tensor]:
        """Inputs for as many samples as the first example has, but not the same ones."""
        return self.batches.others(self.examples[0].inputs, self.examples[0].samples)

    def forward(self) -> None:
        """Run the model on the first example, with the same random numbers each time."""
        reseed(self.examples[0].seed, GENERATORS)
        self.signature.call(self.model, self.examples[0].inputs)


def carried_state(
    model: nn.Module,
    signature: Signature,
    start: State,
    examples: Sequence[Example],
    buffers: Sequence[str],
    batches: InputBatches,
) -> tuple[Carried, Example | None]:
    """The state that a forward of `model` leaves for the next one; and a run that began with what another one had left.

    `start` are the values of its attributes, `examples` runs that began with them; `buffers` are those that they
    changed, `batches` makes other inputs. Raises ModelError for an attribute that cannot be kept with a stage.
    """
    context = _Context(model, signature, start, examples, batches)
    with preserve_state(model), forward_only(examples[0].saves_tensors):
        refuse_changing_globals(model, context.forward)
    if all(state == start for one in examples for state in one.result.states):
        slots: list[Slot] = []
    else:
        slots = _carried_slots(context)
    if not slots and not buffers:
        return Carried(), None
    accesses = _accesses(context, slots)
    slots = [slot for slot in slots if not accesses[slot] or accesses[slot][0].is_read]  # else written anew each time
    if not slots and not buffers:
        return Carried(), None
    _refuse_what_cannot_be_kept(context, slots, accesses)
    blocks = _joined(context, {slot: _block_of(slot, accesses[slot]) for slot in slots})
    used_by_model = _used_by_model(slots, accesses) if "" in blocks else ""
    carried = Carried(tuple(blocks), tuple(map(str, slots)), tuple(buffers), used_by_model)
    return carried, _run(context, context.other_inputs, before=examples[0].inputs, keep_buffers=True)


def _carried_slots(context: _Context) -> list[Slot]:
    """The attributes whose value after a forward depends on the forward before it, or that its results depend on."""
    first, second = context.examples[:2]
    inputs = context.other_inputs
    try:
        fresh = _run(context, inputs, backward=True)
        later = _run(context, inputs, backward=True, before=first.inputs)
    except Exception:  # noqa: BLE001 - a model whose second run fails is asked about all that its first run left
        return _differing(context.start, first.result.states[0])
    found = dict.fromkeys(_carried_between(fresh.result.states[0], later.result.states[0]))
    _refuse_changes_in_backward(context, fresh.result, later.result)
    differs = difference_of(later.result, fresh.result) is not None
    with contextlib.suppress(Exception):  # code that keeps the batch size may refuse another one, as in one process
        larger = _run(context, second.inputs, before=first.inputs, seed=second.seed)
        found.update(dict.fromkeys(_carried_between(second.result.states[0], larger.result.states[0])))
        differs = differs or difference_of(larger.result, second.result) is not None
    if differs and not found:
        return _differing(context.start, first.result.states[0])
    found.update(dict.fromkeys(_read_before_assigned(context)))
    return list(found)


def _read_before_assigned(context: _Context) -> list[Slot]:
    """Attributes that each forward assigns anew, but reads first: results may depend on them later, though not yet.

    Such as the mean of what a BatchNorm returns, which is 0 before its bias is trained.
    """
    accesses = _accesses(context, _differing(context.start, context.examples[0].result.states[0]), later=True)
    return [
        slot for slot, uses in accesses.items() if uses and uses[0].is_read and not all(use.is_read for use in uses)
    ]


def _run(
    context: _Context,
    inputs: Mapping[str, Tensor],
    *,
    backward: bool = False,
    before: Mapping[str, Tensor] | None = None,
    seed: int = _SEED,
    keep_buffers: bool = False,
) -> Example:
    return example(
        *(context.model, context.signature, inputs),
        seed=seed,
        backward=backward,
        saves_tensors=context.examples[0].saves_tensors,
        before=before,
        keep_buffers=keep_buffers,
    )


def _carried_between(fresh: State, later: State) -> list[Slot]:
    return [
        slot
        for slot in _differing(fresh, later)
        if slot not in fresh or slot not in later or not _extends(later[slot], fresh[slot])
    ]


def _extends(later: Any, fresh: Any) -> bool:
    """Return whether `later` is `fresh`, but for more entries of dictionaries: caches that keep all their entries."""
    if later == fresh:
        return True
    if not isinstance(later, Nested) or not isinstance(fresh, Nested) or later.kind is not fresh.kind:
        return False
    if issubclass(later.kind, dict):
        entries = list(zip(later.items[::2], later.items[1::2], strict=True))
        return all(pair in entries for pair in zip(fresh.items[::2], fresh.items[1::2], strict=True))
    same_length = len(later.items) == len(fresh.items)
    return same_length and all(_extends(*pair) for pair in zip(later.items, fresh.items, strict=True))


def _differing(one: State, other: State) -> list[Slot]:
    return [slot for slot in {**one, **other} if slot not in one or slot not in other or one[slot] != other[slot]]


def _refuse_changes_in_backward(context: _Context, fresh: Observation, later: Observation) -> None:
    """Raise ModelError for an attribute that a backward carries on: backwards run in another order than forwards."""
    for slot in _differing(fresh.states[1], later.states[1]):
        if any(slot in _differing(*run.states) for run in (fresh, later)):
            place = f"the backward pass of {title_of(context.model, slot.path)}"
            raise ModelError(
                f"{place} changes {slot} for the next one (by a hook, or by code that runs again in the backward), but "
                "micro-batches do not run backward in the order of one process; remove that hook, or change the "
                "attribute in the forward alone"
            )


def _accesses(context: _Context, slots: Sequence[Slot], *, later: bool = False) -> dict[Slot, list[Access]]:
    """The accesses to `slots` in a forward, or, with `later`, in one that follows another."""
    with preserve_state(context.model), forward_only(context.examples[0].saves_tensors):
        if later:
            context.forward()
        with watched_attributes(context.model, slots) as found:
            context.forward()
    return found


def _refuse_what_cannot_be_kept(
    context: _Context, slots: Sequence[Slot], accesses: Mapping[Slot, Sequence[Access]]
) -> None:
    states = [context.start, *(one.result.states[0] for one in context.examples)]
    for slot in slots:
        place = f"the forward of {title_of(context.model, slot.path)} changes {slot} for the next one"
        if accesses[slot]:
            place += f" ({accesses[slot][-1].line})"
        if slot.attribute in _STRUCTURE or "hooks" in slot.attribute:
            what = _STRUCTURE.get(slot.attribute, "hooks, or what they keep")
            raise ModelError(f"{place}: it changes {what}, which stages cannot follow; do that once, before training")
        if "." in slot.attribute:
            raise ModelError(
                f"{place}: it belongs to the class, of which each function has its own; make it an attribute of the "
                "module, in __init__, that only its own forward uses"
            )
        reason = next((found for state in states if slot in state and (found := why_not_plain(state[slot]))), None)
        if reason is not None:
            out = "keep value.detach()" if "history" in reason else f"keep numbers, strings and tensors, or {_WAY_OUT}"
            raise ModelError(f"{place}: it holds {reason}, which cannot be kept between micro-batches; {out}")


_STRUCTURE = {
    "_parameters": "parameters",
    "_modules": "submodules",
    "_buffers": "which buffers there are",
    "training": "which modules are in training mode",
}


def _block_of(slot: Slot, accesses: Sequence[Access]) -> str:
    """The innermost module around the one that has `slot` that contains all code that uses it."""
    path = slot.path
    while path and not all(path in access.running for access in accesses):
        path = path.rpartition(".")[0]
    return path


def _used_by_model(slots: Sequence[Slot], accesses: Mapping[Slot, Sequence[Access]]) -> str:
    """The first attribute that the model's own code uses, and the line."""
    found = [
        f"{slot} ({access.line})"
        for slot in slots
        for access in accesses[slot]
        if not slot.path or slot.path not in access.running
    ]
    return next(iter(found), "an object that modules share")


def _joined(context: _Context, blocks: Mapping[Slot, str]) -> list[str]:
    """The blocks, outermost only; those whose attributes hold the same object become the module around them."""
    inside = {slot: _objects_in(vars(context.model.get_submodule(slot.path)).get(slot.attribute)) for slot in blocks}
    paths = dict(blocks)
    for one, other in itertools.combinations(blocks, 2):
        if inside[one] & inside[other]:
            paths[one] = paths[other] = common_path(paths[one], paths[other])
    found = list(dict.fromkeys(paths.values()))
    return [path for path in found if not any(is_inside(path, outer) for outer in found if outer != path)]


def _objects_in(value: Any, depth: int = 0) -> frozenset[int]:
    """The identities of the tensors and containers in `value`."""
    if not isinstance(value, Tensor | list | dict | set | deque | tuple) or depth > DEPTH:
        return frozenset()
    below = [_objects_in(part, depth + 1) for part in parts(value)]
    own = frozenset() if isinstance(value, tuple) else frozenset({id(value)})
    return own.union(*below)
