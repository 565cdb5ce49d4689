"""Nodes of a traced graph as plain calls: run one by one, picklable, and freeing values after their last use.

Each call runs under the autocast state that held where the user's code made it, which is read while that is traced. A
model that cannot be divided is one call, of a `WholeModel`.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import takewhile
from types import TracebackType
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from funcpipe.core import Precision
from funcpipe.model.draws import Draws
from funcpipe.model.graph.inputs import Signature
from funcpipe.model.graph.modes import set_mode

Autocast = tuple[tuple[str, torch.dtype], ...]
"""The devices for which autocast is on, and the types that it casts to; empty where it is off."""


_DEVICES = ("cpu", "cuda", "mps", "xpu")


def autocast_to(precision: Precision, device: str = "cpu", *, cached: bool = True) -> torch.autocast:
    """Have `precision` hold on that kind of device, whatever held before; unless `cached`, each use casts anew."""
    dtypes = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}
    if precision not in dtypes:
        return torch.autocast(device, enabled=False, cache_enabled=cached)
    return torch.autocast(device, dtypes[precision], cache_enabled=cached)


def autocast_state() -> Autocast:
    """The present state."""
    if not any(map(torch.is_autocast_enabled, _DEVICES)):
        return ()
    return tuple((device, torch.get_autocast_dtype(device)) for device in _DEVICES if torch.is_autocast_enabled(device))


def changed_autocast(state: Autocast, device: str, dtype: torch.dtype | None, *, enabled: bool) -> Autocast:
    """`state` with autocast switched on or off for one device, as `torch.autocast` does inside another."""
    found = dict(state)
    found.pop(device, None)
    if enabled:
        found[device] = dtype or torch.get_autocast_dtype(device)
    return tuple((name, found[name]) for name in _DEVICES if name in found)


class AutocastRegions:
    """Sets the state for one call after the other, whatever it was before. Consecutive calls with one state share a
    region, in which a parameter is cast once. Regions end with a layer: what a layer computes does not depend on the
    layers beside it.
    """

    def __init__(self) -> None:
        self._outside = self._state = autocast_state()
        self._stack = ExitStack()

    def __enter__(self) -> "AutocastRegions":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def enter(self, state: Autocast) -> None:
        """Set the state for the next call."""
        if state == self._state:
            return
        self._stack.close()
        self._state = state
        if state == self._outside:
            return
        for device, dtype in self._outside:
            if device not in dict(state):
                self._stack.enter_context(torch.autocast(device, dtype, enabled=False))
        for device, dtype in state:
            self._stack.enter_context(torch.autocast(device, dtype))


WHOLE = "<model>"
"""The target of the node that calls a model that runs as a whole; no module of a user's can have this path."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference, among a call's arguments, to the value of the node `name`."""

    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """One node: its fx `op`, target and arguments, the values that it reads, and those of them to free afterwards.

    `flat` says that no Ref is nested inside an argument, `no_grad` that the user's code switched gradients off,
    `autocast` what it casts to; `draws` how the call is seeded if it draws random numbers.
    """

    name: str
    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    reads: tuple[str, ...]
    frees: tuple[str, ...]
    flat: bool
    no_grad: bool
    autocast: Autocast = ()
    draws: Draws | None = None


def compile_nodes(nodes: Sequence[torch.fx.Node], keep: Collection[str]) -> tuple[Call, ...]:
    """`nodes` as calls, in order; each value is freed after its last use unless its name is in `keep`."""
    last: dict[str, int] = {}
    for i, node in enumerate(nodes):
        for name in (node.name, *(used.name for used in node.all_input_nodes)):
            last[name] = i
    calls = []
    for i, node in enumerate(nodes):
        reads = tuple(item.name for item in node.all_input_nodes)
        frees = tuple(name for name in (*reads, node.name) if last[name] == i and name not in keep)
        args, kwargs = plain(node.args), plain(node.kwargs)
        flat = not any(_nested(item) for item in (*args, *kwargs.values()))
        scopes = bool(node.meta.get("no_grad")), node.meta.get("autocast", ())
        draws = node.meta.get("draws")
        calls.append(Call(node.name, node.op, node.target, args, kwargs, reads, frees, flat, *scopes, draws))
    return tuple(calls)


def run(calls: Iterable[Call], env: dict[str, Any], root: nn.Module, seed: tuple[int, int, int] | None = None) -> None:
    """Run `calls` in order; values are kept in `env` by node name, modules and attributes are looked up in `root`.

    Calls that draw random numbers are seeded from `seed`, if it is given.
    """
    with AutocastRegions() as regions:
        for call in calls:
            regions.enter(call.autocast)
            if call.draws is None or seed is None:
                env[call.name] = execute(call, env, root)
            else:
                with call.draws.seeded(seed):
                    env[call.name] = execute(call, env, root)
            for name in call.frees:
                del env[name]


def execute(call: Call, env: Mapping[str, Any], root: nn.Module) -> Any:
    """The value of one call, under the autocast state that is set."""
    if call.no_grad and torch.is_grad_enabled():
        with torch.no_grad():
            return execute(call, env, root)
    if call.op == "get_attr":
        return attribute(root, call.target)
    if call.flat:
        args = [env[item.name] if type(item) is Ref else item for item in call.args]
        kwargs = {key: env[item.name] if type(item) is Ref else item for key, item in call.kwargs.items()}
    else:
        args = resolve(list(call.args), env)
        kwargs = resolve(dict(call.kwargs), env)
    if call.op == "call_module":
        return attribute(root, call.target)(*args, **kwargs)
    if call.op == "call_method":
        return getattr(args[0], call.target)(*args[1:], **kwargs)
    return call.target(*args, **kwargs)


def attribute(root: Any, path: str) -> Any:
    """The object at the dotted `path` below `root`; a module's own entries hide attributes of its class."""
    for name in path.split("."):
        if isinstance(root, nn.Module):
            for kind in (root._modules, root._parameters, root._buffers):
                if name in kind:
                    root = kind[name]
                    break
            else:
                root = getattr(root, name)
        else:
            root = getattr(root, name)
    return root


def state_name(target: str, name: str) -> str:
    """The name in the model of the tensor `name` of the module that a node calls as `target`."""
    return name if target == WHOLE else f"{target}.{name}"


def is_inside(path: str, outer: str) -> bool:
    """Return whether the module at `path` is the one at `outer`, or inside it; the model's own path is empty."""
    return not outer or f"{path}.".startswith(f"{outer}.")


def common_path(*paths: str) -> str:
    """The path of the innermost module around those at `paths`."""
    levels = zip(*(path.split(".") for path in paths), strict=False)
    return ".".join(names[0] for names in takewhile(lambda names: len(set(names)) == 1, levels))


def resolve(item: Any, env: Mapping[str, Any]) -> Any:
    """`item` with every Ref inside replaced by its value in `env`."""
    return map_leaves(item, lambda leaf: env[leaf.name] if type(leaf) is Ref else leaf)


def plain(item: Any) -> Any:
    """Arguments of an fx node as ordinary containers, with Refs for nodes."""
    return map_leaves(item, lambda leaf: Ref(leaf.name) if isinstance(leaf, torch.fx.Node) else leaf)


def map_leaves(item: Any, change: Callable[[Any], Any]) -> Any:
    """`item`, an argument of a node, with `change` applied to every leaf of its tuples, lists, dicts and slices."""
    if isinstance(item, tuple) and not is_built(item):
        items = [map_leaves(part, change) for part in item]
        return type(item)(*items) if hasattr(item, "_fields") else tuple(items)
    if isinstance(item, list):
        return [map_leaves(part, change) for part in item]
    if isinstance(item, dict):
        return {key: map_leaves(part, change) for key, part in item.items()}
    if isinstance(item, slice):
        return slice(map_leaves(item.start, change), map_leaves(item.stop, change), map_leaves(item.step, change))
    return change(item)


def is_built(item: Any) -> bool:
    """Return whether `item` is a named tuple that its own code makes, as a PackedSequence is: no plain container."""
    kind = type(item)
    return (
        isinstance(item, tuple) and hasattr(kind, "_fields") and "__new__" in vars(kind) and kind.__base__ is not tuple
    )


def is_number(item: Any) -> bool:
    """Return whether `item` is an int or a float; a bool is a choice, not a number."""
    return isinstance(item, int | float) and not isinstance(item, bool)


def _nested(item: Any) -> bool:
    return isinstance(item, tuple | list | dict | slice)


class WholeModel(nn.Module):
    """Calls a user's model with the tensors of its signature; shares the model's parameters, buffers and modules, so
    that their names are those of the model.
    """

    def __init__(self, model: nn.Module, signature: Signature) -> None:
        super().__init__()
        vars(self)["model"] = model  # not as a child, which would change the names
        self.signature = signature
        share_contents(self, model)

    def forward(self, *tensors: Tensor) -> Any:
        """The model's output, as it is."""
        args, kwargs = self.signature.arguments(dict(zip(self.signature.tensors, tensors, strict=True)))
        return vars(self)["model"](*args, **kwargs)

    def train(self, mode: bool = True) -> "WholeModel":
        """Have the model's own `train()` or `eval()` called."""
        set_mode(vars(self)["model"], training=mode)
        self.training = mode
        return self


def share_contents(module: nn.Module, source: nn.Module) -> None:
    """Let `module` have the very parameters, buffers and children of `source`, whatever becomes of them."""
    module._parameters, module._buffers, module._modules = source._parameters, source._buffers, source._modules
    module._non_persistent_buffers_set = source._non_persistent_buffers_set
