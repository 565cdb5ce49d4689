"""The first tracer: symbolic tracing by torch.fx, with torch.nn's modules as leaves.

Each symbolic value carries its value for two sizes of the inputs, as fake tensors without data. Where both agree on a
shape, or on what follows from shapes, Python code may loop and branch on it: the graph then expects the same of every
micro-batch.
"""

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.proxy import TraceError
from torch.overrides import TorchFunctionMode

from funcpipe.model.graph.node_functions import Container, expect_count, expect_number, rebuilt
from funcpipe.model.graph.patches import (
    ContentsAsked,
    attributes_restored,
    factories_recorded,
    gradient_code_refused,
    numbers_recorded,
    refuse_unrecordable,
    unpacked_names,
)
from funcpipe.model.graph.program import autocast_state, is_built
from funcpipe.model.graph.sizes import reads_size
from funcpipe.model.graph.tracers import (
    LengthsFixed,
    RecordedModule,
    Traced,
    TraceRequest,
    flatten_output,
    innermost,
)
from funcpipe.model.graph.user_code import user_line
from funcpipe.model.tensors import Tree, flatten


def trace_fx(request: TraceRequest) -> Traced:
    """Trace the model symbolically; exceptions of its code or of the tracer are not caught."""
    modules: list[dict[str, Any]] = []
    while True:
        try:
            return _trace(request, modules)
        except ContentsAsked as error:
            if any(error.code is code for code in modules):
                raise
            modules.append(error.code)


def _trace(request: TraceRequest, numbers: Sequence[dict[str, Any]]) -> Traced:
    """Trace the model; `numbers` are the modules, by their globals, that turn the contents of tensors into numbers."""
    tracer = _Tracer(request)
    with (
        attributes_restored(request.model),
        factories_recorded(tracer),
        numbers_recorded(numbers),
        gradient_code_refused(),
    ):
        try:
            graph = tracer.trace(request.model)
        except ContentsAsked:
            raise
        except Exception as error:
            if tracer.sizes_differ:
                raise LengthsFixed(str(error)) from error
            raise
        module = RecordedModule(request.model, graph, class_name=type(request.model).__name__)
    modules = dict(request.model.named_modules(remove_duplicate=False))
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack", {})
        node.meta["call"] = innermost(stack, request, modules)
        node.meta["path"] = next((path for path, _ in reversed(stack.values())), "")
    (output,) = [node for node in graph.nodes if node.op == "output"]
    return Traced(module, tuple(output.args[0]), tracer.output_tree, tracer.notes)


class _Tracer(torch.fx.Tracer):
    """Gives the model a placeholder for each tensor of its signature, and flattens its output."""

    proxy_buffer_attributes = True

    def __init__(self, request: TraceRequest) -> None:
        super().__init__()
        self.request = request
        self.output_tree = Tree()
        self.notes: tuple[str, ...] = ()
        self.sizes_differ = False  # whether code has asked for a number that differs between the examples
        self._inside = frozenset(request.model.modules())
        own = next((t.fake_mode for t in request.model.parameters() if isinstance(t, FakeTensor)), None)
        self._modes = [own or FakeTensorMode(allow_non_fake_inputs=True) for _ in request.examples]
        self._evaluating = False

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return what the request says."""
        return self.request.is_leaf(m, module_qualified_name)

    def proxy(self, node: torch.fx.Node) -> "_Proxy":
        """A proxy that carries its example values."""
        return _Proxy(node, self)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Record the call, unless it is part of computing an example value, or the module is not the model's."""
        if self._evaluating or m not in self._inside:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Record the access, unless it is part of computing an example value."""
        return attr_val if self._evaluating else super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_arg(self, a: Any) -> Any:
        """An argument of a node; an object that is more than a named tuple, such as a PackedSequence, is a node."""
        leaves, tree = flatten(a) if is_built(a) else ([], None)
        if tree is None or not any(isinstance(leaf, torch.fx.Proxy) for leaf in leaves):
            return super().create_arg(a)
        args: tuple[Any, ...] = Container(tree, type(a)), [self.create_arg(leaf) for leaf in leaves]
        node = self.create_node("call_function", rebuilt, args, {})
        node.meta |= {"no_grad": not torch.is_grad_enabled(), "autocast": autocast_state()}
        examples = self._evaluated(node)
        node.meta |= {} if examples is None else {"examples": examples}
        return node

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """A function that calls the model with the placeholders in place of the sample's tensors."""
        proxies, examples = {}, self.request.examples
        for name in self.request.signature.tensors:
            proxy = self.create_proxy("placeholder", name.replace(".", "_"), (), {})
            proxy.node.meta["input"] = name
            proxy.node.meta["examples"] = [
                mode.from_tensor(example[name]) for mode, example in zip(self._modes, examples, strict=True)
            ]
            proxies[name] = proxy

        def forward(root: nn.Module) -> list[Any]:
            args, kwargs = self.request.signature.arguments(proxies)
            leaves, self.output_tree, self.notes = flatten_output(root_fn(root, *args, **kwargs))
            return leaves

        return forward, [self.root]

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **named: Any) -> Any:
        """Record a node; returns a Python value instead of a proxy where both examples agree on it."""
        name = target if kind == "call_method" else getattr(target, "__name__", "")
        if kind in ("call_method", "call_function"):
            refuse_unrecordable(target, name, [])
        proxy = super().create_proxy(kind, target, args, kwargs, *more, **named)
        proxy.node.meta["no_grad"] = not torch.is_grad_enabled()
        proxy.node.meta["autocast"] = autocast_state()
        if kind not in ("placeholder", "output"):
            examples = self._evaluated(proxy.node)
            if examples is not None:
                proxy.node.meta["examples"] = examples
                return self._concrete(proxy, examples)
        return proxy

    def _concrete(self, proxy: torch.fx.Proxy, examples: list[Any]) -> Any:
        """`proxy`, or the Python value that it stands for; a shape that is known in part becomes a tuple with proxies.

        What is computed from numbers that differ stays symbolic, even where both examples agree on it.
        """
        node = proxy.node
        if any(_is_symbolic(used) for used in node.all_input_nodes):
            return proxy
        if all(isinstance(example, torch.Size) for example in examples):
            if len({len(example) for example in examples}) == 1:
                node.meta["asked"] = self._place()
                pairs = enumerate(zip(*examples, strict=True))
                return tuple(one if one == two else proxy[i] for i, (one, two) in pairs)  # type: ignore[index]
            return proxy
        if not all(isinstance(example, _CONSTANT) for example in examples) or examples[0] != examples[1]:
            return proxy
        if reads_size(node):
            node.meta["asked"] = self._place()
        elif node.target is getattr and node.args[1] != "nbytes":  # a type, or a fact about it
            self.graph.erase_node(node)
        elif isinstance(examples[0], int | float):
            self.expect(expect_number, node, examples[0])
        return examples[0]

    def expect(self, target: Callable[..., None], node: torch.fx.Node, value: Any) -> None:
        """Have the graph check that `node` has the `value` that code has got for it."""
        if "expected" not in node.meta:
            node.meta["expected"] = value
            check = self.create_node("call_function", target, (node, *self._place(), value), {})
            check.meta["autocast"] = autocast_state()

    def _place(self) -> tuple[str, str]:
        """The path of the module whose code is running, and a text that tells its line."""
        path = next((path for path, _ in reversed(self.module_stack.values())), "")
        return path, user_line(path or type(self.root).__name__)

    def iter(self, obj: torch.fx.Proxy) -> Iterator[Any]:
        """The items of a value that is unknown, as many as the code unpacks."""
        items = list(super().iter(obj))
        self.expect(expect_count, obj.node, len(items))
        return iter(items)

    def _evaluated(self, node: torch.fx.Node) -> list[Any] | None:
        """The value of `node` for each example; None if fake tensors cannot compute it."""
        if any("examples" not in used.meta for used in node.all_input_nodes):
            node.meta["data_sized"] = any(used.meta.get("data_sized") for used in node.all_input_nodes)
            return None
        self._evaluating = True
        try:
            return [self._value(node, i, mode) for i, mode in enumerate(self._modes)]
        except (DynamicOutputShapeException, DataDependentOutputException):
            node.meta["data_sized"] = True
            return None
        except Exception:  # noqa: BLE001 - fake tensors support less than real ones
            return None
        finally:
            self._evaluating = False

    def _value(self, node: torch.fx.Node, i: int, mode: FakeTensorMode) -> Any:
        args = torch.fx.node.map_arg(node.args, lambda used: used.meta["examples"][i])
        kwargs = torch.fx.node.map_arg(node.kwargs, lambda used: used.meta["examples"][i])
        with mode, _Faking(mode), torch.no_grad():
            if node.op == "get_attr":
                return torch.fx.graph_module._get_attr(self.root, str(node.target))
            if node.op == "call_module":
                return self.root.get_submodule(str(node.target))(*args, **kwargs)
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            return node.target(*args, **kwargs)  # type: ignore[operator]


class _Faking(TorchFunctionMode):
    """Gives torch's functions fake tensors for a model's own: given real ones, `mode` works each result out anew."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function."""
        if getattr(func, "__name__", "") != "__get__":
            args = tuple(map(self._faked, args))
        return func(*args, **(kwargs or {}))

    def _faked(self, item: Any) -> Any:
        if type(item) in (Tensor, nn.Parameter):
            with torch._C.DisableTorchFunction():
                return self._mode.fake_tensor_converter.from_real_tensor(self._mode, item)
        return type(item)(map(self._faked, item)) if type(item) in (list, tuple) else item


class _Proxy(torch.fx.Proxy):
    """A symbolic value that converts to Python values where both examples agree."""

    tracer: _Tracer

    def __getattr__(self, k: str) -> Any:
        examples = self.node.meta.get("examples")
        if examples is None or k.startswith("__") or callable(getattr(examples[0], k)):
            return super().__getattr__(k)
        return self.tracer.create_proxy("call_function", getattr, (self, k), {})

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})

    def __bool__(self) -> bool:
        return bool(self._common("a condition"))

    def __int__(self) -> int:
        return int(self._common("an integer"))

    def __index__(self) -> int:
        return int(self._common("an integer"))

    def __float__(self) -> float:
        return float(self._common("a number"))

    def __len__(self) -> int:
        examples = self.node.meta.get("examples", ())
        lengths = {len(example) for example in examples}
        if len(lengths) != 1:
            self.tracer.sizes_differ = True
            raise TraceError(f"the length of {self.node.name} depends on the sizes of the inputs or the data")
        (length,) = lengths
        if isinstance(examples[0], Tensor):
            self.tracer.create_proxy("call_method", "size", (self, 0), {})
        else:
            self.tracer.expect(expect_count, self.node, length)
        return length

    def __iter__(self) -> Iterator[Any]:
        if self.node.meta.get("examples") is None:
            count = unpacked_names(sys._getframe(1))
            if count is None:
                return iter(self.tracer.iter(self))
            self.tracer.expect(expect_count, self.node, count)
            return iter([self[i] for i in range(count)])  # type: ignore[index]
        return iter([self[i] for i in range(len(self))])  # type: ignore[index]

    def _common(self, what: str) -> Any:
        examples = self.node.meta.get("examples", ())
        if not examples or any(isinstance(example, Tensor) for example in examples):
            reason = f"{what} depends on the contents of a tensor"
            code = sys._getframe(2).f_globals
            if what != "a condition" and not f"{code.get('__name__')}.".startswith("torch."):
                raise ContentsAsked(code, reason)
            raise TraceError(reason)
        if any(example != examples[0] for example in examples):
            self.tracer.sizes_differ = True
            raise TraceError(f"{what} depends on the sizes of the inputs: {' or '.join(map(repr, examples))}")
        self.tracer.expect(expect_number, self.node, examples[0])
        return examples[0]


def _is_symbolic(node: torch.fx.Node) -> bool:
    """Return whether `node` computes a number or a shape that differs between the examples."""
    if node.op == "get_attr":
        return False
    examples = node.meta.get("examples", ())
    return bool(examples) and not any(isinstance(leaf, Tensor) for example in examples for leaf in flatten(example)[0])


_CONSTANT = (int, float, bool, str, torch.dtype, torch.device, torch.layout, type(None))
