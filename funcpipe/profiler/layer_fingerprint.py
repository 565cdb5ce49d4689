"""Recognise equal layers, of which only one has to be measured."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from funcpipe.model.graph.node_functions import EXPECTATIONS
from funcpipe.model.graph.program import Call, Ref, attribute, map_leaves
from funcpipe.model.split import StageModule


def layer_fingerprint(stage: StageModule, values: Mapping[str, Tensor]) -> str:
    """Return a text that is the same for two layers only if they compute the same on tensors of the same kind.

    It lists the calls, the settings of modules, and shape, type and layout of parameters and values.
    """
    program = stage.program
    numbers: dict[str, int] = {}
    for i, (name, node) in enumerate(program.placeholders.items()):
        numbers[node] = i
        numbers[name] = i
    given = [(name in stage.differentiable, _kind(values[name])) for name in (*stage.inputs, *stage.receives)]
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
    return repr((given, constants, calls, sent, sorted(numbers[node] for node in program.copied), stage.is_last))


def _call(stage: StageModule, call: Call, numbers: Mapping[str, int]) -> Any:
    def canonical(leaf: Any) -> Any:
        return ("value", numbers[leaf.name]) if isinstance(leaf, Ref) else leaf

    target: Any = call.target
    if call.op == "call_module":
        target = _module(attribute(stage, call.target))
    elif call.op == "get_attr":
        target = _kind(attribute(stage, call.target))
    elif call.op == "call_function":
        target = (getattr(target, "__module__", ""), str(target))
    arguments = map_leaves(call.args, canonical), map_leaves(dict(call.kwargs), canonical)
    return call.op, target, *arguments, call.no_grad, call.autocast


def _kind(item: Any) -> Any:
    if isinstance(item, Tensor):
        shared = isinstance(item, nn.Parameter)
        return str(item.dtype), tuple(item.shape), item.stride(), shared, shared and item.requires_grad
    return repr(item)


def _module(module: nn.Module) -> Any:
    """Return the class, settings and tensors of a module and its children; other objects by identity."""
    kept = ("_parameters", "_buffers", "_modules")
    settings = {name: _setting(item) for name, item in sorted(vars(module).items()) if name not in kept}
    tensors = [(name, _kind(item)) for own in (module._parameters, module._buffers) for name, item in own.items()]
    inner = [(name, child and _module(child)) for name, child in module._modules.items()]
    return id(type(module)), settings, tensors, inner


def _setting(item: Any) -> Any:
    if isinstance(item, bool | int | float | complex | str | bytes | type(None)):
        return item
    if isinstance(item, tuple | list | set | frozenset):
        return type(item).__name__, [_setting(part) for part in item]
    if isinstance(item, dict):
        return [(repr(key), _setting(part)) for key, part in item.items()]
    return _kind(item) if isinstance(item, Tensor) else id(item)
