"""Results of runs: of a model or its graph as a whole, with their differences, and of every node of a graph."""

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from funcpipe.model.draws import GENERATORS, DrawingOperators, generator_states
from funcpipe.model.graph.program import AutocastRegions, Call, compile_nodes, execute, plain, resolve
from funcpipe.model.graph.python_state import State
from funcpipe.model.tensors import Tree, fingerprint, flatten, is_dense, same, storage_id, tensors_in

TOLERANCE = 1e-4
"""The largest difference between a graph's results and the model's that counts as rounding, relative to the largest
element.
"""


@dataclass(frozen=True)
class Observation:
    """The result of a run: the leaves of the output, fingerprints of the random number generators afterwards, the
    buffers it changed, and a digest of each parameter's gradient (None if no backward pass was run).

    `written` are the buffers that it wrote to in place, even if they hold the same afterwards. `states` are the values
    of the model's attributes after the forward and after the backward, where they were read. `late` are the buffers
    that the backward pass changed.
    """

    leaves: tuple[Any, ...]
    generators: Mapping[str, int]
    buffers: Mapping[str, Tensor]
    gradients: Mapping[str, tuple[float, float]] | None
    written: frozenset[str] = frozenset()
    states: tuple[State, ...] = ()
    late: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """A difference of two runs by more than rounding, in words; `buffers` are those that only one of them changes."""

    text: str
    buffers: tuple[str, ...] = ()


def difference_of(found: Observation, expected: Observation) -> Difference | None:
    """The difference of two runs; None if there is none but rounding."""
    if text := _result_difference(found, expected):
        return Difference(text)
    if found.buffers.keys() != expected.buffers.keys():
        names = tuple(sorted(found.buffers.keys() ^ expected.buffers.keys()))
        return Difference(f"it does not change the same buffers: {', '.join(names)}", names)
    for name, tensor in expected.buffers.items():
        if not _close(found.buffers[name], tensor):
            return Difference(f"it leaves different values in the buffer {name}")
    text = _gradient_difference(found.gradients or {}, expected.gradients or {})
    return None if text is None else Difference(text)


def _result_difference(found: Observation, expected: Observation) -> str | None:
    for name, state in expected.generators.items():
        if found.generators[name] != state:
            return f"it draws other random numbers from {name}'s generator than the model: some were frozen or dropped"
    if len(found.leaves) != len(expected.leaves):
        return f"its output has {len(found.leaves)} parts, the model's {len(expected.leaves)}"
    for i, (one, other) in enumerate(zip(found.leaves, expected.leaves, strict=True)):
        if not _close(one, other):
            return f"part {i} of its output differs from the model's"
    return None


def _gradient_difference(
    found: Mapping[str, tuple[float, float]], expected: Mapping[str, tuple[float, float]]
) -> str | None:
    largest = max((digest[1] for digest in expected.values()), default=0.0)
    for name in [*found, *expected]:
        if name not in found or name not in expected:
            return f"only {'the model' if name in expected else 'the graph'} has a gradient for {name}"
        (one, _), (other, size) = found[name], expected[name]
        if abs(one - other) > TOLERANCE * max(size, 1e-6 * largest):
            return f"its gradient for {name} differs from the model's"
    return None


def _close(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return bool(one == other)
    if fingerprint(one) is not None or fingerprint(other) is not None:
        return same(one, other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point() or not one.numel():
        return torch.equal(one, other)
    finite = other[other.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 1.0
    return torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE * scale, equal_nan=True)


@dataclass(frozen=True)
class TensorFacts:
    """Layout and type of a tensor; `symbols` names, by dimension, the free size that it is, or None.

    One that is not `dense`, such as a sparse one, cannot be sent to another stage.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    symbols: tuple[str | None, ...] = ()
    dense: bool = True


@dataclass(frozen=True)
class NodeRecord:
    """The run of one node: its value's tree and leaves (TensorFacts for tensors, anything else as it is), and its
    effects.

    `draws` are the random number generators that it used. `changes` names the nodes whose values lie in memory that it
    wrote to; `returns` those of them that it returns as its own value, `direct` those that it was given as arguments.
    `freed` are others whose values lay in that memory, and that no later node reads.
    `differentiable` are the leaves (node, position) in memory that it wrote to that require a gradient afterwards.
    `operators_that_draw` is how many of torch's operators drew, or None if they were not counted.
    """

    tree: Tree
    leaves: tuple[Any, ...]
    draws: frozenset[str] = frozenset()
    changes: tuple[str, ...] = ()
    returns: tuple[str, ...] = ()
    direct: tuple[str, ...] = ()
    freed: frozenset[str] = frozenset()
    differentiable: frozenset[tuple[str, int]] = frozenset()
    operators_that_draw: int | None = None

    @property
    def written(self) -> frozenset[str]:
        """All nodes whose values lay in memory that this one wrote to."""
        return self.freed.union(self.changes)


def observe(
    module: torch.fx.GraphModule,
    inputs: Mapping[str, Tensor],
    outputs: Sequence[Any],
    drawing: Collection[str] = (),
) -> tuple[dict[str, NodeRecord], list[Any]]:
    """Run every node of `module` on `inputs`, by placeholder: the record of each, and the values of `outputs`.

    In the nodes that `drawing` names, torch's operators that draw random numbers are counted, which is slower.
    Holds the values that are still to be read in memory; what autograd saves is up to the caller.
    """
    nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
    kept = {node.name for node in outputs if isinstance(node, torch.fx.Node)} | inputs.keys()
    env: dict[str, Any] = dict(inputs)
    records = {name: _record(tensor) for name, tensor in inputs.items()}
    earlier: dict[str, frozenset[str]] = {}
    with AutocastRegions() as regions:
        for call in compile_nodes(nodes, kept):
            regions.enter(call.autocast)
            counted = DrawingOperators() if call.name in drawing and call.op != "call_module" else None
            with counted or contextlib.nullcontext():
                record = _run_node(call, env, module)
            earlier[call.name] = _in_its_memory(call, env, earlier)
            freed = frozenset(old for name in record.changes for old in earlier.get(name, ()) if old not in env)
            drawn = counted.count if counted else None
            records[call.name] = replace(record, freed=freed, operators_that_draw=drawn)
            for name in call.frees:
                del env[name]
    return records, list(resolve(list(plain(tuple(outputs))), env))


def _run_node(call: Call, env: dict[str, Any], module: nn.Module) -> NodeRecord:
    if call.op == "get_attr":
        value = env[call.name] = execute(call, env, module)
        return _record(value)
    generators = GENERATORS if call.op == "call_module" else ("torch",)
    before = generator_states(generators)
    versions = [(tensor, tensor._version) for name in call.reads for tensor in tensors_in(env[name])]
    value = execute(call, env, module)
    after = generator_states(generators)
    draws = frozenset(name for name in generators if before[name] != after[name])
    written = {_address(tensor) for tensor, version in versions if tensor._version != version}
    changes = _stored_in(written, env) if written else ()
    returns = tuple(name for name in changes if env[name] is value)
    env[call.name] = value
    direct = tuple(name for name in changes if name in call.reads)
    differentiable = frozenset(
        (name, i)
        for name in changes
        for i, leaf in enumerate(flatten(env[name])[0])
        if isinstance(leaf, Tensor) and leaf.requires_grad
    )
    return replace(
        _record(value), draws=draws, changes=changes, returns=returns, direct=direct, differentiable=differentiable
    )


def _in_its_memory(call: Call, env: Mapping[str, Any], earlier: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """The earlier nodes whose values share memory with that of `call`, which is a view of them, or one of them."""
    addresses = {_address(tensor) for tensor in tensors_in(env[call.name]) if is_dense(tensor)}
    shared = [
        name
        for name in call.reads
        if any(is_dense(tensor) and _address(tensor) in addresses for tensor in tensors_in(env[name]))
    ]
    return frozenset(shared).union(*(earlier.get(name, ()) for name in shared))


def _record(value: Any) -> NodeRecord:
    leaves, tree = flatten(value)
    return NodeRecord(tree, tuple(_facts(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves))


def _stored_in(addresses: set[int], env: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(
        name for name, item in env.items() if any(_address(tensor) in addresses for tensor in tensors_in(item))
    )


def _facts(tensor: Tensor) -> TensorFacts:
    if not is_dense(tensor):
        return TensorFacts(tuple(tensor.shape), (), tensor.dtype, tensor.requires_grad, dense=False)
    return TensorFacts(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad)


def _address(tensor: Tensor) -> int:
    return storage_id(tensor)
