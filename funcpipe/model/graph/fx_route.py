"""The first route from a model to a graph: symbolic tracing by torch.fx, with torch.nn's modules left whole.

Beside each symbolic value goes what it is for two batch sizes, as fake tensors that hold no data. Shapes and what
follows from them are thus known where they are the same for both, so that Python code may loop and branch on them.
"""

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.proxy import TraceError

from funcpipe.model.graph.tracers import Traced, TraceTask, innermost, take_output_apart
from funcpipe.model.graph.tree import Tree


def trace_fx(task: TraceTask) -> Traced:
    """Trace the model symbolically; whatever its code or the tracer raises comes through."""
    tracer = _Tracer(task)
    with _attributes_kept(task.model):
        graph = tracer.trace(task.model)
        module = torch.fx.GraphModule(task.model, graph, class_name=type(task.model).__name__)
    modules = dict(task.model.named_modules(remove_duplicate=False))
    for node in graph.nodes:
        node.meta["call"] = innermost(node.meta.get("nn_module_stack", {}), task, modules)
    (output,) = [node for node in graph.nodes if node.op == "output"]
    return Traced(module, tuple(output.args[0]), tracer.output_tree, tracer.notes)


class _Tracer(torch.fx.Tracer):
    """Gives the model one placeholder for each tensor of its signature and takes its output apart into leaves."""

    proxy_buffer_attributes = True

    def __init__(self, task: TraceTask) -> None:
        super().__init__()
        self.task = task
        self.output_tree = Tree()
        self.notes: tuple[str, ...] = ()
        self._modes = [FakeTensorMode(allow_non_fake_inputs=True) for _ in task.examples]
        self._evaluating = False

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """As the task says."""
        return self.task.is_leaf(m, module_qualified_name)

    def proxy(self, node: torch.fx.Node) -> "_Proxy":
        """Proxies that know what the examples tell of them."""
        return _Proxy(node, self)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Record the call, unless it is made while an example is computed."""
        return forward(*args, **kwargs) if self._evaluating else super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Record the access, unless it is made while an example is computed."""
        return attr_val if self._evaluating else super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """A function of the placeholders that calls the model as the sample did."""
        proxies = {}
        for name in self.task.signature.tensors:
            proxy = self.create_proxy("placeholder", name.replace(".", "_"), (), {})
            proxy.node.meta["input"] = name
            proxy.node.meta["facts"] = [
                mode.from_tensor(example[name]) for mode, example in zip(self._modes, self.task.examples, strict=True)
            ]
            proxies[name] = proxy

        def forward(root: nn.Module) -> list[Any]:
            args, kwargs = self.task.signature.arguments(proxies)
            leaves, self.output_tree, self.notes = take_output_apart(root_fn(root, *args, **kwargs))
            return leaves

        return forward, [self.root]

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **named: Any) -> Any:
        """Record a node; gives the value itself where that is a Python value that both examples agree on."""
        proxy = super().create_proxy(kind, target, args, kwargs, *more, **named)
        proxy.node.meta["no_grad"] = not torch.is_grad_enabled()
        if kind not in ("placeholder", "output"):
            facts = self._evaluated(proxy.node)
            if facts is not None:
                proxy.node.meta["facts"] = facts
                return _settled(proxy, facts)
        return proxy

    def _evaluated(self, node: torch.fx.Node) -> list[Any] | None:
        """What `node` is for each example; None where a fake tensor cannot tell."""
        if any("facts" not in used.meta for used in node.all_input_nodes):
            return None
        self._evaluating = True
        try:
            return [self._value(node, i, mode) for i, mode in enumerate(self._modes)]
        except Exception:  # noqa: BLE001 - fake tensors support less than real ones; then nothing is known
            return None
        finally:
            self._evaluating = False

    def _value(self, node: torch.fx.Node, i: int, mode: FakeTensorMode) -> Any:
        args = torch.fx.node.map_arg(node.args, lambda used: used.meta["facts"][i])
        kwargs = torch.fx.node.map_arg(node.kwargs, lambda used: used.meta["facts"][i])
        with mode, torch.no_grad():
            if node.op == "get_attr":
                return torch.fx.graph_module._get_attr(self.root, str(node.target))
            if node.op == "call_module":
                return self.root.get_submodule(str(node.target))(*args, **kwargs)
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            return node.target(*args, **kwargs)  # type: ignore[operator]


class _Proxy(torch.fx.Proxy):
    """A symbolic value that answers Python's questions where the examples agree on the answer."""

    def __getattr__(self, k: str) -> Any:
        facts = self.node.meta.get("facts")
        if facts is None or k.startswith("__") or callable(getattr(facts[0], k)):
            return super().__getattr__(k)
        return self.tracer.create_proxy("call_function", getattr, (self, k), {})

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})

    def __bool__(self) -> bool:
        return bool(self._agreed("a condition"))

    def __int__(self) -> int:
        return int(self._agreed("an integer"))

    def __index__(self) -> int:
        return int(self._agreed("an integer"))

    def __float__(self) -> float:
        return float(self._agreed("a number"))

    def __len__(self) -> int:
        lengths = {len(fact) for fact in self.node.meta.get("facts", ())}
        if len(lengths) != 1:
            raise TraceError(f"the length of {self.node.name} depends on the batch size or on the data")
        return lengths.pop()

    def __iter__(self) -> Iterator[Any]:
        if self.node.meta.get("facts") is None:
            return iter(self.tracer.iter(self))
        return iter([self[i] for i in range(len(self))])  # type: ignore[index]

    def _agreed(self, what: str) -> Any:
        facts = self.node.meta.get("facts", ())
        if not facts or any(isinstance(fact, Tensor) for fact in facts):
            raise TraceError(f"{what} depends on the data that a tensor holds")
        if any(fact != facts[0] for fact in facts):
            raise TraceError(f"{what} depends on the batch size: {' or '.join(map(repr, facts))}")
        return facts[0]


def _settled(proxy: torch.fx.Proxy, facts: list[Any]) -> Any:
    """`proxy`, or the Python value that it stands for; a shape with unknown numbers becomes a tuple with proxies
    inside.
    """
    if all(isinstance(fact, torch.Size) for fact in facts):
        items = list(zip(*facts, strict=True)) if len({len(fact) for fact in facts}) == 1 else []
        if len(items) == len(facts[0]):
            return tuple(one if one == two else proxy[i] for i, (one, two) in enumerate(items))  # type: ignore[index]
    if not all(isinstance(fact, _CONSTANT) for fact in facts) or facts[0] != facts[1]:
        return proxy
    return facts[0]


_CONSTANT = (int, float, bool, str, torch.dtype, torch.device, torch.layout, type(None))


@contextlib.contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """Take back the constants that fx hangs on the model while it traces."""
    before = set(vars(model))
    try:
        yield
    finally:
        for name in set(vars(model)) - before:
            if isinstance(vars(model)[name], Tensor):
                delattr(model, name)
