"""One run of a traced model on the sample: what each node gives, changes in place, and whether it draws at random."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from funcpipe.model.graph.isolation import GENERATORS, positions
from funcpipe.model.graph.program import Call, compile_nodes, execute, plain, resolve
from funcpipe.model.graph.tree import Tree, take_apart


@dataclass(frozen=True)
class Facts:
    """What is known of a tensor after it is gone; `batched` if its first dimension is the batch."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    batched: bool = False


@dataclass(frozen=True)
class Seen:
    """One node: its value's tree and leaves (Facts of tensors, other things as they are), and what its run did.

    `draws` are the generators of random numbers that it used.
    `changes` names the nodes whose values lie in memory that it wrote to; `returns` those among them that it gives
    back as its own value, `direct` those that it was given.
    """

    tree: Tree
    leaves: tuple[Any, ...]
    draws: frozenset[str] = frozenset()
    changes: tuple[str, ...] = ()
    returns: tuple[str, ...] = ()
    direct: tuple[str, ...] = ()


def observe(
    module: torch.fx.GraphModule, inputs: Mapping[str, Tensor], outputs: Sequence[Any]
) -> tuple[dict[str, Seen], list[Any]]:
    """Run every node of `module` on `inputs` (by placeholder); gives what was seen of each, and the values of
    `outputs`.

    Memory: the values that are still to be read, and what autograd keeps, which is up to the caller.
    """
    nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
    kept = {node.name for node in outputs if isinstance(node, torch.fx.Node)} | inputs.keys()
    env: dict[str, Any] = dict(inputs)
    seen = {name: _seen(tensor) for name, tensor in inputs.items()}
    for call in compile_nodes(nodes, kept):
        seen[call.name] = _observed(call, env, module)
        for name in call.frees:
            del env[name]
    return seen, list(resolve(list(plain(tuple(outputs))), env))


def _observed(call: Call, env: dict[str, Any], module: nn.Module) -> Seen:
    if call.op == "get_attr":
        value = env[call.name] = execute(call, env, module)
        return _seen(value)
    generators = GENERATORS if call.op == "call_module" else ("torch",)
    before = positions(generators)
    versions = [(tensor, tensor._version) for name in call.reads for tensor in _tensors(env[name])]
    value = execute(call, env, module)
    after = positions(generators)
    draws = frozenset(name for name in generators if before[name] != after[name])
    written = {_address(tensor) for tensor, version in versions if tensor._version != version}
    changes = _lying_in(written, env) if written else ()
    returns = tuple(name for name in changes if env[name] is value)
    env[call.name] = value
    direct = tuple(name for name in changes if name in call.reads)
    return replace(_seen(value), draws=draws, changes=changes, returns=returns, direct=direct)


def _seen(value: Any) -> Seen:
    leaves, tree = take_apart(value)
    return Seen(tree, tuple(_facts(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves))


def _lying_in(addresses: set[int], env: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(name for name, item in env.items() if any(_address(tensor) in addresses for tensor in _tensors(item)))


def _facts(tensor: Tensor) -> Facts:
    return Facts(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad)


def _tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [leaf for leaf in take_apart(value)[0] if isinstance(leaf, Tensor)]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
