"""Record the calls that a model's code makes on tensors while it runs."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from funcpipe.model.draws import generator_states
from funcpipe.model.graph.eager_calls import (
    DataDependent,
    DataSizes,
    Entry,
    Inside,
    draws_random_numbers,
    is_metadata,
    node_target,
    reads_sizes,
)
from funcpipe.model.graph.node_functions import Container, leaf_at, rebuilt
from funcpipe.model.graph.patches import patched, refuse_unrecordable
from funcpipe.model.graph.program import Ref, autocast_state, map_leaves
from funcpipe.model.graph.tracers import TraceRequest, Unrecordable, is_innermost
from funcpipe.model.graph.user_code import current_line
from funcpipe.model.tensors import flatten, is_dense, tensors_in

_NON_TORCH = ("numpy", "random")


class NonTorchRandomness(Unrecordable):
    """The code of a module draws random numbers from numpy or Python, which no graph can reproduce."""

    def __init__(self, path: str) -> None:
        super().__init__("the module draws random numbers without torch, which tracing would freeze", path)


class EagerTracer(TorchFunctionMode):
    """Records calls of torch's functions and of modules that are leaves as `entries`.

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
        self._sizes = DataSizes()
        self._inside: Inside | None = None  # the leaf module or Function whose code is running
        self._in_torch = False  # whether a function of torch is running, which may call Functions of its own
        self._path = ""  # of the module whose code is running
        self._generator_states = generator_states(_NON_TORCH)
        self._original_apply = vars(Function)["apply"]
        self._original: Callable[..., Any] = nn.Module.__call__
        for name, tensor in inputs.items():
            self._known[tensor] = Ref(f"input:{name}")

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the calls in this context."""

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._module(module, args, kwargs)

        def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
            return self._function(function, args, kwargs)

        with patched(nn.Module, __call__=call), patched(Function, apply=classmethod(apply)), self._sizes, self:
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, and record it if it returns or mutates a tensor."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        given = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        if self._inside is None:
            refuse_unrecordable(func, name, given)
            if reads_sizes(func, name):
                self._refuse_data_sizes(given)
        else:
            self._refuse_strangers(name, given, self._inside)
        self._sizes.begin()
        self._in_torch = True
        try:
            result = func(*args, **kwargs)
        finally:
            self._in_torch = False
        if self._inside is not None:
            self._sizes.follow(name, args, given, result)
        elif name == "__setitem__" or any(isinstance(leaf, Tensor) for leaf in flatten(result)[0]):
            ref = self._record(*node_target(func, name, args), kwargs, result)
            if ref.name not in self._fixed:
                self._sizes.follow(name, args, given, result)
        elif not is_metadata(name):
            self._refuse_data_dependence(name, given)
        return result

    def _refuse_data_sizes(self, tensors: list[Tensor]) -> None:
        if any(tensor in self._sizes for tensor in tensors):
            raise DataDependent("the code asks for a size that depends on the contents of a tensor")

    def _refuse_strangers(self, name: str, given: list[Tensor], inside: Inside) -> None:
        """Raise Unrecordable if code inside a leaf reads a tensor from outside that no argument has brought there."""
        for tensor in given:
            known = self._known.get(tensor)
            changes = tensor.requires_grad if known is None else known.name not in self._fixed
            if not changes or id(tensor) in inside.tensors or (known is None and id(tensor) not in self._state):
                continue
            raise Unrecordable(f"{name.strip('_')}() reads a tensor that {inside.title} is not given", inside.caller)

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
            raise Unrecordable("a tensor comes from code that cannot be traced")
        if not is_dense(tensor):
            raise Unrecordable("the code reads a sparse or quantised tensor that it has not made")
        name = self._state.get(id(tensor), f"_constant{len(self.attributes)}")
        self.attributes[name] = tensor
        ref = self._add("get_attr", name, (), {})
        if name.startswith("_constant") or not (tensor.requires_grad or name in self._request.changed):
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
        if self._inside is not None or not path:
            return self._original(module, *args, **kwargs)
        is_leaf = self._request.is_leaf(module, path)
        outer = self._call
        if outer is None and (is_leaf or is_innermost(module)):
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
        self._inside = self._entered(path, module, (args, kwargs))
        try:
            result = self._original(module, *args, **kwargs)
        finally:
            self._inside = None
        self._generator_states = generator_states(_NON_TORCH)
        self.modules.add(path)
        self._bind(self._add("call_module", path, *given), result)
        if isinstance(module, torch.jit.ScriptModule):
            self._sizes.follow(path, (), tensors_in((args, kwargs)), result)
        return result

    def _function(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Record a torch.autograd.Function as one call, which keeps its own backward."""
        apply = self._original_apply.__get__(None, function)
        if self._inside is not None or self._in_torch:
            return apply(*args, **kwargs)
        title = function.__name__
        if any(isinstance(leaf, nn.Module) for leaf in flatten((args, kwargs))[0]):
            raise Unrecordable(f"the Function {title} is given a module, whose parameters the graph would not see")
        self._inside = self._entered(title, None, (args, kwargs))
        try:
            result = apply(*args, **kwargs)
        finally:
            self._inside = None
        self._record("call_function", apply, args, kwargs, result)
        self._sizes.follow(title, (), tensors_in((args, kwargs)), result)
        return result

    def _entered(self, title: str, module: nn.Module | None, given: Any) -> Inside:
        own = [] if module is None else [tensor for _, tensor in _state(module)]
        return Inside(title, self._path, {id(tensor): tensor for tensor in (*own, *tensors_in(given))})

    def _record(self, op: str, target: Any, args: Any, kwargs: Any, result: Any) -> Ref:
        given, named = self._references((args, kwargs))
        refs: list[Any] = []
        map_leaves((given, named), lambda leaf: refs.append(leaf) if isinstance(leaf, Ref) else None)
        ref = self._add(op, target, given, named)
        if all(used.name in self._fixed for used in refs) and not draws_random_numbers(target):
            self._fixed.add(ref.name)
        self._bind(ref, result)
        return ref

    def _references(self, value: Any) -> Any:
        return map_leaves(value, self._reference)

    def _reference(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self.reference(leaf)
        leaves, tree = flatten(leaf)
        if not any(isinstance(inner, Tensor) for inner in leaves):
            return leaf
        return self._add("call_function", rebuilt, (Container(tree, type(leaf)), self._references(leaves)), {})

    def _add(self, op: str, target: Any, args: Any, kwargs: Any) -> Ref:
        ref = Ref(f"entry:{len(self.entries)}")
        scopes = not torch.is_grad_enabled(), autocast_state()
        self.entries.append(Entry(ref.name, op, target, args, kwargs, self._call, *scopes, self._path, current_line()))
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
