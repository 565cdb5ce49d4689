"""Equal layers: only one of them is timed, and of those without weights only one is run.

    layer           is given            saves           sends
    block 3.mlp     storage 7, 32 MB    7, and 44 MB    storage 8, 32 MB      what a run has shown
    block 4.mlp     storage 9, 32 MB    9, and 44 MB    storage 10, 32 MB     what follows from that

Without weights a run shows the forms of tensors alone, and which of them lie in one storage. They follow from the
layer's fingerprint, and from where the tensors that it is given and holds lie. Those of them that have contents, such
as masks, must be the very same.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from funcpipe.model.graph.node_functions import EXPECTATIONS
from funcpipe.model.graph.program import Call, Ref, attribute, map_leaves
from funcpipe.model.graph.reachable import plain_attributes
from funcpipe.model.graph.repeated import item_kind, module_kind
from funcpipe.model.split import StageModule
from funcpipe.model.tensors import fingerprint, is_dense, storage_id
from funcpipe.model.weightless import placed
from funcpipe.profiler.measure import LayerRun


class LayerRuns:
    """Runs layers with `run`, unless what that shows follows from the run of an equal layer."""

    def __init__(self, run: Callable[[StageModule, dict[str, Tensor]], LayerRun]) -> None:
        self._run = run
        self._known: dict[Any, _Known] = {}

    def of(self, stage: StageModule, values: dict[str, Tensor], kind: str) -> LayerRun:
        """The run on `values` of the layer `stage`, whose fingerprint is `kind`."""
        tensors = [*_given(stage, values), *held_tensors(stage)]
        if not all(map(is_dense, tensors)) or not any(map(_is_empty, tensors)):
            return self._run(stage, values)
        key = kind, _ends(stage), _places(tensors)
        if key in self._known:
            return self._known[key].again(stage, tensors)
        found = self._run(stage, values)
        if _shows_forms_alone(found, tensors):
            self._known[key] = _Known(found, tensors)
        return found


@dataclass(frozen=True)
class _Known:
    """The run of a layer that was given and held these tensors; they stay alive, so that no identity comes twice."""

    run: LayerRun
    tensors: Sequence[Tensor]

    def again(self, stage: StageModule, tensors: Sequence[Tensor]) -> LayerRun:
        """The run of `stage`, an equal layer that is given and holds `tensors`."""
        storages = {storage_id(a): b.untyped_storage() for a, b in zip(self.tensors, tensors, strict=True)}
        addresses = {storage_id(a): storage_id(b) for a, b in zip(self.tensors, tensors, strict=True)}
        sent: dict[str, Tensor] = {}
        for name, made in zip(stage.sends, self.run.sent.values(), strict=True):
            own = storage_id(made)
            if own not in storages:
                size = made.untyped_storage().nbytes()
                storages[own] = torch.empty(size, dtype=torch.uint8, device="meta").untyped_storage()
            sent[name] = placed(made, storages[own])
            addresses[own] = storage_id(sent[name])
        return replace(self.run, sent=sent, saved={addresses[own]: size for own, size in self.run.saved.items()})


def _shows_forms_alone(run: LayerRun, tensors: Sequence[Tensor]) -> bool:
    """Return whether nothing that a layer sends has contents, and what it saves is among what it is given and sends."""
    sent = run.sent.values()
    seen = {storage_id(tensor) for tensor in (*tensors, *sent)}
    return run.saved.keys() <= seen and all(type(one) is FakeTensor and not one.dtype.is_complex for one in sent)


def _is_empty(tensor: Tensor) -> bool:
    return fingerprint(tensor) is not None


def _given(stage: StageModule, values: Mapping[str, Tensor]) -> list[Tensor]:
    return [values[name] for name in (*stage.inputs, *stage.receives)]


def _places(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """Where each tensor lies: in the how manieth storage, of which size; and which one it is, if it has contents."""
    numbers: dict[int, int] = {}
    return tuple(
        (
            numbers.setdefault(storage_id(tensor), len(numbers)),
            int(tensor.storage_offset()),
            tensor.untyped_storage().nbytes(),
            tensor.requires_grad,
            None if _is_empty(tensor) else id(tensor),
        )
        for tensor in tensors
    )


def _ends(stage: StageModule) -> str:
    """How a layer takes apart what it receives, what it checks, and how it puts together what it sends."""
    program = stage.program
    calls = [call for layer in program.layers for call in layer.calls]
    given = (*program.placeholders.values(), *(item.node for item in program.received), *program.symbols)
    numbers = {name: i for i, name in enumerate((*given, *(call.name for call in calls)))}
    layouts = [(program.values[name].stride, program.values[name].scalar) for name in stage.receives]
    ends = [
        (item.node in given, item.tree, item.constants, [name is None for name in item.names])
        for item in (*program.received, *program.sent)
    ]
    checks = [_checked(call, numbers) for call in calls if call.target in EXPECTATIONS]
    return repr((layouts, ends, checks))


def _checked(call: Call, numbers: Mapping[str, int]) -> Any:
    value, _, _, *expected = call.args  # but the module and the line, which differ between equal layers
    numbered = map_leaves(
        [value, *expected], lambda leaf: ("value", numbers[leaf.name]) if isinstance(leaf, Ref) else leaf
    )
    return numbers[call.name], call.target.__name__, numbered


def held_tensors(stage: StageModule) -> list[Tensor]:
    """The tensors of what a layer calls and reads, in this order: parameters, buffers, and attributes of modules."""
    found: list[Any] = []
    for call in (call for layer in stage.program.layers for call in layer.calls):
        if call.op == "get_attr":
            found.append(attribute(stage, call.target))
        for module in attribute(stage, call.target).modules() if call.op == "call_module" else ():
            found += [*module._parameters.values(), *module._buffers.values()]
            found += _items(plain_attributes(module))
    return [item for item in found if isinstance(item, Tensor)]


def _items(value: Any) -> list[Any]:
    """What is in the containers whose items are compared as settings of modules."""
    parts = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list | tuple | set | frozenset):
        return [value]
    return [item for part in parts for item in _items(part)]


def layer_fingerprint(stage: StageModule, values: Mapping[str, Tensor]) -> str:
    """Return a text that is the same for two layers only if they compute the same on tensors of the same kind.

    It lists the calls, the settings of modules, shape, type and layout of parameters and values, and which of the
    parameters are one.
    """
    program = stage.program
    numbers: dict[str, int] = {}
    for i, (name, node) in enumerate(program.placeholders.items()):
        numbers[node] = i
        numbers[name] = i
    given = [(name in stage.differentiable, item_kind(values[name])) for name in (*stage.inputs, *stage.receives)]
    for crossing in program.received:
        numbers[crossing.node] = len(numbers)
    for node in program.symbols:
        numbers[node] = len(numbers)
    calls = []
    for layer in program.layers:
        for call in layer.calls:
            numbers[call.name] = len(numbers)
            if call.target in EXPECTATIONS:  # which name the layer, and take no time
                continue
            calls.append(_call(stage, call, numbers))
    sent = [numbers[crossing.node] for crossing in program.sent]
    constants = [crossing.constants for crossing in program.received]
    copied = sorted(numbers[node] for node in program.copied)
    places = {name: i for i, name in enumerate((*stage.inputs, *stage.receives))}
    symbols = [(places[name], dim) for name, dim in program.symbols.values()]
    tied: dict[int, int] = {}
    ties = [tied.setdefault(id(tensor), len(tied)) for tensor in held_tensors(stage)]
    return repr((given, constants, calls, sent, copied, symbols, ties, stage.is_last))


def _call(stage: StageModule, call: Call, numbers: Mapping[str, int]) -> Any:
    def canonical(leaf: Any) -> Any:
        return ("value", numbers[leaf.name]) if isinstance(leaf, Ref) else leaf

    target: Any = call.target
    if call.op == "call_module":
        target = module_kind(attribute(stage, call.target))
    elif call.op == "get_attr":
        target = item_kind(attribute(stage, call.target))
    elif call.op == "call_function":
        target = (getattr(target, "__module__", ""), str(target))
    arguments = map_leaves(call.args, canonical), map_leaves(dict(call.kwargs), canonical)
    return call.op, target, *arguments, call.no_grad, call.autocast
