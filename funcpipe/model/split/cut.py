"""Cut a layer graph into stages, as a plan says, and a model in eval mode where the plan cuts it in training.

Code may do something else in eval mode: an auxiliary head is left out, a dropout is no node any more. So the model is
traced once more, and each layer goes to the stage that holds the layer of its name in training; a layer that training
does not have goes with the layer before it.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch.fx
from torch import Tensor, nn

from funcpipe.core import Plan
from funcpipe.errors import ModelError, PlanError
from funcpipe.model.graph.program import WHOLE, attribute, compile_nodes, is_inside, plain
from funcpipe.model.graph.symbols import Symbol
from funcpipe.model.graph.values import Carried, Crossing, Layer, LayerGraph
from funcpipe.model.split.stage import LayerProgram, StageModule, StageProgram
from funcpipe.model.tensors import LEAF


def split(graph: LayerGraph, bounds: Sequence[tuple[int, int]]) -> tuple[StageModule, ...]:
    """A module for each of `bounds`, ranges [first, stop) of the graph's layers, which share the traced model's
    parameters.

    Raises PlanError unless the ranges cover all layers in order.
    """
    expected = 0
    for first, stop in bounds:
        if first != expected or stop <= first:
            raise PlanError(f"a stage of layers [{first}, {stop}) cannot follow one that stops at {expected}")
        expected = stop
    if expected != len(graph.layers):
        raise PlanError(f"the stages hold {expected} layers, but {graph.name} has {len(graph.layers)}")
    return tuple(stage_of(graph, first, stop) for first, stop in bounds)


def stage_bounds(graph: LayerGraph, plan: Plan) -> tuple[tuple[int, int], ...]:
    """The layers of `graph` in each stage of `plan`; raises PlanError if the plan was made for another model."""
    bounds = []
    first = 0
    for i, stage in enumerate(plan.stages):
        stop = first + len(stage.layers)
        names = tuple(layer.name for layer in graph.layers[first:stop])
        if not stage.layers or names != stage.layers:
            planned, found = _difference(stage.layers, names)
            whose = f" ({plan.model})" if plan.model else ""
            raise PlanError(
                f"the plan{whose} is for another model: stage {i} expects {planned} where {graph.name} has {found}; "
                "profile this model and plan again"
            )
        _check_parameters(graph, plan, i, first, stop)
        bounds.append((first, stop))
        first = stop
    if first != len(graph.layers):
        raise PlanError(
            f"the plan is for another model: it ends with layer {graph.layers[first - 1].name!r}, but {graph.name} "
            f"continues with {graph.layers[first].name!r}; profile this model and plan again"
        )
    return tuple(bounds)


def _check_parameters(graph: LayerGraph, plan: Plan, number: int, first: int, stop: int) -> None:
    """Raise PlanError if the plan knows how large the stage's parameters are, and here they are not."""
    planned = plan.stages[number].parameter_bytes
    tensors = [tensor for layer in graph.layers[first:stop] for tensor in graph.tensors_of(layer).values()]
    trainable = {id(t): t for t in tensors if isinstance(t, nn.Parameter) and t.requires_grad}
    found = sum(tensor.nbytes for tensor in trainable.values())
    if planned is not None and found != planned:
        whose = f" ({plan.model})" if plan.model else ""
        what = "this model with its teachers" if graph.held else "this model"
        raise PlanError(
            f"the plan{whose} is for another model: the trainable parameters of stage {number} take {planned} bytes "
            f"there, those of {graph.name} {found} bytes; profile {what} and plan again"
        )


def _difference(planned: Sequence[str], found: Sequence[str]) -> tuple[str, str]:
    for i, name in enumerate(planned):
        if i >= len(found):
            return f"layer {name!r}", "no more layers"
        if found[i] != name:
            return f"layer {name!r}", f"{found[i]!r}"
    return "no layer", f"{found[0]!r}" if found else "none"


def stage_of(graph: LayerGraph, first: int, stop: int) -> StageModule:
    """The layers [first, stop) as a module."""
    layers = graph.layers[first:stop]
    tensors = {name: tensor for layer in layers for name, tensor in graph.tensors_of(layer).items()}
    stage = StageModule(
        _program(graph, first, stop),
        is_last=stop == len(graph.layers),
        training=graph.training,
        statistics=tuple(item for item in graph.statistics if item.names[0] in tensors),
        shared=_shared(graph, first, stop, tensors),
        other_names=_other_names(graph, tensors),
        carried=_carried(graph, layers, tensors),
    )
    nodes = [node for layer in layers for node in layer.nodes]
    for kind in ("call_module", "get_attr"):
        for target in dict.fromkeys(str(node.target) for node in nodes if node.op == kind):
            _attach(stage, target, attribute(graph.module, target), is_saved=target in graph.state)
    for layer in layers:
        for name, parameter in graph.held.get(layer.name, {}).items():
            _attach(stage, name, parameter)
    return stage


def _program(graph: LayerGraph, first: int, stop: int) -> StageProgram:
    layers = graph.layers[first:stop]
    is_last = stop == len(graph.layers)
    outputs = graph.outputs if is_last else ()
    results = {node.name for node in outputs if isinstance(node, torch.fx.Node)}
    read = results | {used.name for layer in layers for node in layer.nodes for used in node.all_input_nodes}
    order = graph.crossing_order
    received = tuple(graph.crossings[i] for i in sorted(order[name] for name in read & order.keys()))
    received = tuple(item for item in received if item.producer < first)
    sent = tuple(item for i in range(first, stop) for item in graph.sent_by.get(i, ()) if item.consumers[-1] >= stop)
    values, sources = graph.value_named, graph.input_nodes
    placeholders = {name: node for name, node in sources.items() if node in read}
    claimed = {symbol for item in sent for name in item.names if name for symbol in values[name].symbols}
    symbols = {}
    for item in graph.size_nodes:
        if item.name in read or item.meta["symbol"].name in claimed:
            symbols[item.name] = _source(graph, item.meta["symbol"], placeholders, received)
            name = symbols[item.name][0]
            if name in sources:
                placeholders[name] = sources[name]
    given = {*placeholders.values(), *(item.node for item in received)}
    return StageProgram(
        layers=_layer_programs(layers, results | {item.node for item in sent} | set(sources.values())),
        placeholders=placeholders,
        symbols=symbols,
        claims=_claims(graph, sent),
        copied=frozenset(name for layer in layers for name in layer.changes) & given,
        received=received,
        sent=sent,
        values={name: values[name] for item in (*received, *sent) for name in item.names if name is not None},
        outputs=plain(outputs),
        output_tree=graph.output_tree if is_last else LEAF,
    )


def _source(
    graph: LayerGraph, symbol: Symbol, placeholders: Collection[str], received: Sequence[Crossing]
) -> tuple[str, int]:
    """The model input or received value from which a stage reads a free size of the inputs, and the dimension."""
    assert graph.signature.checks is not None
    for name in placeholders:
        if symbol.name in graph.signature.checks.sizes[name]:
            return name, graph.signature.checks.sizes[name].index(symbol.name)
    for name in (name for item in received for name in item.names if name is not None):
        if symbol.name in graph.value_named[name].symbols:
            return name, graph.value_named[name].symbols.index(symbol.name)
    return symbol.source, symbol.dim


def _claims(graph: LayerGraph, sent: Sequence[Crossing]) -> tuple[tuple[str, int, str], ...]:
    """The free sizes that a stage sends and other stages may read: a value, its dimension, the node of the size."""
    nodes = {item.meta["symbol"].name: item.name for item in graph.size_nodes}
    names = [name for item in sent for name in item.names if name is not None]
    return tuple(
        (name, dim, nodes[symbol])
        for name in names
        for dim, symbol in enumerate(graph.value_named[name].symbols)
        if symbol in nodes
    )


def _layer_programs(layers: Sequence[Layer], keep: Collection[str]) -> tuple[LayerProgram, ...]:
    """The calls of the layers; an attribute that several of them read is read once."""
    nodes: dict[torch.fx.Node, None] = {}
    ends = []
    for layer in layers:
        nodes.update(dict.fromkeys(layer.nodes))
        ends.append(len(nodes))
    calls = compile_nodes(tuple(nodes), keep)
    starts = [0, *ends]
    return tuple(
        LayerProgram(layer.name, calls[start:end]) for layer, start, end in zip(layers, starts, ends, strict=False)
    )


def _shared(graph: LayerGraph, first: int, stop: int, held: Collection[str]) -> dict[str, str]:
    """The trainable parameters among `held` that layers outside [first, stop) use too, each with its name in all
    stages.
    """
    across = [tie for tie in graph.ties if not all(first <= layer < stop for layer in tie.layers)]
    return {name: tie.names[0] for tie in across for name in tie.names if name in held}


def _other_names(graph: LayerGraph, held: Collection[str]) -> dict[str, str]:
    """The names of the model for tensors that a stage holds under others, each with one of those."""
    found: dict[str, str] = {}
    for names in graph.tied_names:
        own = [name for name in names if name in held]
        found |= {name: own[0] for name in names if own and name not in held}
    return found


def _carried(graph: LayerGraph, layers: Sequence[Layer], held: Mapping[str, Tensor]) -> Carried:
    """The state that the `layers`, which hold the tensors `held`, leave from one forward to the next."""
    called = [str(node.target) for layer in layers for node in layer.nodes if node.op == "call_module"]
    blocks = tuple(
        path for path in graph.carried.blocks if any(outer == WHOLE or is_inside(path, outer) for outer in called)
    )
    averaged = {name for item in graph.statistics for name in item.buffers}
    buffers = {name: tensor for name, tensor in held.items() if not isinstance(tensor, nn.Parameter)}
    changed = {id(tensor) for name, tensor in buffers.items() if name in graph.carried.buffers}
    return Carried(
        blocks=blocks,
        attributes=tuple(name for name in graph.carried.attributes if any(is_inside(name, path) for path in blocks)),
        buffers=tuple(
            name
            for name, tensor in buffers.items()
            if name not in averaged and (id(tensor) in changed or any(is_inside(name, path) for path in blocks))
        ),
    )


def _attach(stage: StageModule, target: str, item: Any, *, is_saved: bool = True) -> None:
    """Add `item`, the traced model's object at `target`, to `stage` at the same path, unless it is there already."""
    if target == WHOLE:
        stage.attach_whole(item)
        return
    *path, name = target.split(".")
    owner: nn.Module = stage
    for part in path:
        if part not in owner._modules:
            owner._modules[part] = nn.Module()
        owner = owner._modules[part]  # type: ignore[assignment]
    if name in owner._modules or name in owner._parameters or name in owner._buffers:
        return
    if isinstance(item, nn.Module):
        owner._modules[name] = item
    elif isinstance(item, nn.Parameter):
        owner._parameters[name] = item
    elif isinstance(item, Tensor):
        owner._buffers[name] = item
        if not is_saved:
            owner._non_persistent_buffers_set.add(name)
    else:
        setattr(owner, name, item)


def matched_bounds(graph: LayerGraph, plan: Plan) -> tuple[tuple[int, int], ...]:
    """The layers of `graph`, a model in eval mode, in each stage of `plan`, which was made for the model in training.

    Raises PlanError if a stage has no layers in eval mode, or the layers come in another order.
    """
    stage_of = {name: number for number, stage in enumerate(plan.stages) for name in stage.layers}
    chosen: list[int] = []
    for layer in graph.layers:
        before = chosen[-1] if chosen else 0
        own = stage_of.get(layer.name, before)
        if own < before:
            raise PlanError(
                f"{graph.name} cannot be evaluated by this plan: in eval mode, layer {layer.name!r} of stage {own} "
                f"comes after layers of stage {before}; plan with both in one stage (together=), or with one stage"
            )
        chosen.append(own)
    empty = sorted(set(range(len(plan.stages))) - set(chosen))
    if empty:
        layers = plan.stages[empty[0]].layers
        raise PlanError(
            f"{graph.name} cannot be evaluated by this plan: in eval mode, stage {empty[0]} ({layers[0]!r} to "
            f"{layers[-1]!r}) has no layers; profile this model and plan again, with fewer stages"
        )
    starts = [chosen.index(number) for number in range(len(plan.stages))]
    return tuple(zip(starts, [*starts[1:], len(chosen)], strict=True))


def check_shared(stages: Sequence[StageModule], trained: Sequence[StageModule]) -> None:
    """Raise ModelError unless each of `stages`, in eval mode, uses only tensors that its stage in training holds."""
    for number, (stage, own) in enumerate(zip(stages, trained, strict=True)):
        held = {id(tensor) for tensor in (*own.parameters(), *own.buffers())}
        named = (*stage.named_parameters(remove_duplicate=False), *stage.named_buffers(remove_duplicate=False))
        missing = [name for name, tensor in named if id(tensor) not in held and _is_trained(tensor, trained)]
        if missing:
            raise ModelError(
                f"in eval mode, stage {number} of the model uses {missing[0]}, which it does not hold in training; "
                "use it in training in the same module, or plan with all that use it in one stage"
            )


def _is_trained(tensor: object, trained: Sequence[StageModule]) -> bool:
    """Return whether a tensor changes in training, as those of all stages do; others stay as they were uploaded."""
    return any(tensor is other for stage in trained for other in (*stage.parameters(), *stage.buffers()))
