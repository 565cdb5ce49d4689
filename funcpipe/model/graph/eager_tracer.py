"""Record the calls that a model's code makes on tensors while it runs."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property
from torch.utils.weak import WeakIdKeyDictionary

from funcpipe.model.graph.isolation import generator_states
from funcpipe.model.graph.program import Ref, map_leaves
from funcpipe.model.graph.tracers import TraceRequest
from funcpipe.model.graph.tree import flatten


class DataDependent(Exception):
    """The code reads the contents of a tensor, which change from one micro-batch to the next."""


_NON_TORCH = ("numpy", "random")


class NonTorchRandomness(Exception):
    """The code of the module at `path` draws random numbers from numpy or Python, which no graph can reproduce."""

    def __init__(self, path: str) -> None:
        super().__init__("the module draws random numbers without torch, which tracing would freeze")
        self.path = path


@dataclass(frozen=True)
class Entry:
    """One recorded call: fx's op and target, the arguments (with Refs for tensors), the call of the innermost module
    that made it, and whether gradients were off.
    """

    name: str
    op: str
    target: Any
    args: Any
    kwargs: Any
    call: tuple[str, int] | None
    no_grad: bool


def leaf_at(value: Any, path: str) -> Any:
    """The leaf of a nested value at `path`."""
    leaves, tree = flatten(value)
    return leaves[tree.paths("").index(path)]


class EagerTracer(TorchFunctionMode):
    """While entered, records calls of torch's functions and of modules that are leaves as `entries`.

    `attributes` are the tensors that are neither inputs nor results of calls: the model's, by name, and constants.
    """

    def __init__(self, request: TraceRequest, inputs: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self.attributes: dict[str, Tensor] = {}
        self.modules: set[str] = set()
        self.outputs: list[Any] = []
        self._request = request
        self._paths = {id(module): path for path, module in request.model.named_modules()}
        self._known: Any = WeakIdKeyDictionary()  # tensors to Refs
        self._unread: Any = WeakIdKeyDictionary()  # tensors inside results: (Ref of the call, path, innermost module)
        self._fixed: set[str] = set()  # names of entries that are the same for any inputs and parameters
        self._state = {id(tensor): name for name, tensor in _state(request.model)}
        self._calls: Counter[str] = Counter()
        self._call: tuple[str, int] | None = None
        self._paused = False
        self._path = ""  # of the module whose code is running
        self._generator_states = generator_states(_NON_TORCH)
        self._original_apply = vars(Function)["apply"]
        self._original: Callable[..., Any] = nn.Module.__call__
        for name, tensor in inputs.items():
            self._known[tensor] = Ref(f"input:{name}")

    def __enter__(self) -> "EagerTracer":
        tracer = self

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return tracer._module(module, args, kwargs)

        def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
            return tracer._function(function, args, kwargs)

        nn.Module.__call__ = call  # type: ignore[method-assign]
        Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        nn.Module.__call__ = self._original  # type: ignore[method-assign]
        Function.apply = self._original_apply  # type: ignore[method-assign]
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, and record it if it returns or mutates a tensor."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._paused:
            return result
        name = getattr(func, "__name__", str(func))
        given = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        made = any(isinstance(leaf, Tensor) for leaf in flatten(result)[0])
        if name == "__set__" and func.__self__.__name__ != "requires_grad":
            raise DataDependent(f"an assignment to .{func.__self__.__name__} cannot be recorded")
        if made or name == "__setitem__":
            self._record(*_target(func, name, args), kwargs, result)
        elif not _is_metadata(func, name):
            self._refuse_data_dependence(name, given)
        return result

    def reference(self, tensor: Tensor) -> Ref:
        """The Ref of `tensor`: a call, an input, an attribute of the model, or a constant."""
        if tensor in self._known:
            known: Ref = self._known[tensor]
            return known
        if tensor in self._unread:
            ref = self._read_leaf(*self._unread.pop(tensor))
            self._known[tensor] = ref
            return ref
        if tensor.grad_fn is not None and id(tensor) not in self._state:
            raise DataDependent("a tensor comes from code that cannot be traced")
        name = self._state.get(id(tensor), f"_constant{len(self.attributes)}")
        self.attributes[name] = tensor
        ref = self._add("get_attr", name, (), {})
        if name.startswith("_constant") or not tensor.requires_grad:
            self._fixed.add(ref.name)
        self._known[tensor] = ref
        return ref

    def _read_leaf(self, whole: Ref, path: str, call: tuple[str, int] | None) -> Ref:
        ref = self._add("call_function", leaf_at, (whole, path), {})
        self.entries[-1] = replace(self.entries[-1], call=call)
        if whole.name in self._fixed:
            self._fixed.add(ref.name)
        return ref

    def _module(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        path = self._paths.get(id(module))
        if self._paused or not path:
            return self._original(module, *args, **kwargs)
        is_leaf = self._request.is_leaf(module, path)
        outer = self._call
        if outer is None and (is_leaf or not any(module.children())):
            self._call = (path, self._calls[path])
            self._calls[path] += 1
        try:
            return (self._call_leaf if is_leaf else self._call_inside)(module, path, args, kwargs)
        finally:
            self._call = outer

    def _call_inside(self, module: nn.Module, path: str, args: Any, kwargs: Any) -> Any:
        self.refuse_non_torch_randomness()
        outer, self._path = self._path, path
        result = self._original(module, *args, **kwargs)
        self.refuse_non_torch_randomness()
        self._path = outer
        return result

    def refuse_non_torch_randomness(self) -> None:
        """Raise NonTorchRandomness if numpy's or Python's generator advanced outside of leaf modules."""
        if generator_states(_NON_TORCH) != self._generator_states:
            raise NonTorchRandomness(self._path)

    def _call_leaf(self, module: nn.Module, path: str, args: Any, kwargs: Any) -> Any:
        given = self._references((args, kwargs))
        self.refuse_non_torch_randomness()
        self._paused = True
        try:
            result = self._original(module, *args, **kwargs)
        finally:
            self._paused = False
        self._generator_states = generator_states(_NON_TORCH)
        self.modules.add(path)
        self._bind(self._add("call_module", path, *given), result)
        return result

    def _function(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Record a torch.autograd.Function as one call, which keeps its own backward."""
        apply = self._original_apply.__get__(None, function)
        if self._paused:
            return apply(*args, **kwargs)
        self._paused = True
        try:
            result = apply(*args, **kwargs)
        finally:
            self._paused = False
        self._record("call_function", apply, args, kwargs, result)
        return result

    def _record(self, op: str, target: Any, args: Any, kwargs: Any, result: Any) -> None:
        given, named = self._references((args, kwargs))
        refs: list[Any] = []
        map_leaves((given, named), lambda leaf: refs.append(leaf) if isinstance(leaf, Ref) else None)
        ref = self._add(op, target, given, named)
        if all(used.name in self._fixed for used in refs) and not _draws(target):
            self._fixed.add(ref.name)
        self._bind(ref, result)

    def _references(self, value: Any) -> Any:
        return map_leaves(value, self._reference)

    def _reference(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self.reference(leaf)
        if any(isinstance(inner, Tensor) for inner in flatten(leaf)[0]):
            raise DataDependent(f"a {type(leaf).__name__} that holds tensors is passed to a module that is not traced")
        return leaf

    def _add(self, op: str, target: Any, args: Any, kwargs: Any) -> Ref:
        ref = Ref(f"entry:{len(self.entries)}")
        no_grad = not torch.is_grad_enabled()
        self.entries.append(Entry(ref.name, op, target, args, kwargs, self._call, no_grad))
        return ref

    def _bind(self, ref: Ref, result: Any) -> None:
        """Remember the tensors in `result` as `ref`, or as leaves of it."""
        if isinstance(result, Tensor):
            self._known[result] = ref
            return
        leaves, tree = flatten(result)
        for leaf, path in reversed(list(zip(leaves, tree.paths(""), strict=True))):
            if isinstance(leaf, Tensor):
                self._known.pop(leaf, None)
                self._unread[leaf] = (ref, path, self._call)

    def _refuse_data_dependence(self, name: str, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if self.reference(tensor).name not in self._fixed:
                raise DataDependent(f"{name.strip('_')}() reads a tensor whose contents depend on the data")


def _state(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _target(func: Any, name: str, args: Any) -> tuple[str, Any, Any]:
    if name == "__get__":
        return "call_function", getattr, (args[0], func.__self__.__name__)
    if is_tensor_method_or_property(func) and args and isinstance(args[0], Tensor):
        return "call_method", name, args
    return "call_function", func, args


_METADATA = {
    "size", "dim", "numel", "stride", "storage_offset", "element_size", "ndimension", "nelement", "get_device",
    "can_cast", "result_type", "promote_types", "__len__", "__hash__", "__repr__", "__format__", "data_ptr",
    "untyped_storage", "has_names", "register_hook", "requires_grad_", "retain_grad",
}  # fmt: skip


def _is_metadata(func: Any, name: str) -> bool:
    """Whether a result that is no tensor follows from shapes and types alone."""
    access = name in _METADATA or name in ("__get__", "__set__")
    return access or (name.startswith("is_") and name != "is_nonzero") or name in ("broadcast_shapes", "finfo", "iinfo")


def _draws(target: Any) -> bool:
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return any(
        word in name for word in ("rand", "drop", "bernoulli", "normal", "uniform", "multinomial", "exponential")
    )
