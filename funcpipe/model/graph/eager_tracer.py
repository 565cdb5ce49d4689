"""Writes down what a model's code calls on tensors while it runs."""

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

from funcpipe.model.graph.isolation import positions
from funcpipe.model.graph.program import Ref, map_leaves
from funcpipe.model.graph.tracers import TraceTask
from funcpipe.model.graph.tree import take_apart


class DataDependent(Exception):
    """The code asks what a tensor holds, which changes from one micro-batch to the next."""


_FOREIGN = ("numpy", "random")


class ForeignDraw(Exception):
    """The code of the module at `path` draws random numbers from numpy or Python, which cannot be written down."""

    def __init__(self, path: str) -> None:
        super().__init__("the module draws random numbers that are not torch's; they would be frozen")
        self.path = path


@dataclass(frozen=True)
class Entry:
    """One call: fx's word for its kind, what, with what (Refs for tensors), by which innermost module, and how."""

    name: str
    op: str
    target: Any
    args: Any
    kwargs: Any
    call: tuple[str, int] | None
    no_grad: bool


def part(value: Any, path: str) -> Any:
    """The leaf of a nested value to which `path` leads."""
    leaves, tree = take_apart(value)
    return leaves[tree.paths("").index(path)]


class EagerTracer(TorchFunctionMode):
    """As a context: the calls of torch's functions, and of modules that are left whole, become entries.

    `attributes` are the tensors that do not come from calls or inputs: the model's, by their names, and constants.
    """

    def __init__(self, task: TraceTask, inputs: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self.attributes: dict[str, Tensor] = {}
        self.modules: set[str] = set()
        self.outputs: list[Any] = []
        self._task = task
        self._paths = {id(module): path for path, module in task.model.named_modules()}
        self._known: Any = WeakIdKeyDictionary()  # tensors to Refs
        self._parts: Any = (
            WeakIdKeyDictionary()
        )  # tensors that nobody has read yet to the call that made them, and where
        self._fixed: set[str] = set()  # the entries that are the same for any inputs and parameters
        self._state = {id(tensor): name for name, tensor in _state(task.model)}
        self._calls: Counter[str] = Counter()
        self._call: tuple[str, int] | None = None
        self._paused = False
        self._path = ""  # of the module whose code runs
        self._positions = positions(_FOREIGN)
        self._original_apply = vars(Function)["apply"]
        self._original: Callable[..., Any] = nn.Module.__call__
        for name, tensor in inputs.items():
            self._known[tensor] = Ref(f"input:{name}")

    def __enter__(self) -> "EagerTracer":
        recorder = self

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return recorder._module(module, args, kwargs)

        def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
            return recorder._function(function, args, kwargs)

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
        """Run `func` and, if it gives tensors or writes into one, note it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._paused:
            return result
        name = getattr(func, "__name__", str(func))
        given = [leaf for leaf in take_apart((args, kwargs))[0] if isinstance(leaf, Tensor)]
        made = any(isinstance(leaf, Tensor) for leaf in take_apart(result)[0])
        if name == "__set__" and func.__self__.__name__ != "requires_grad":
            raise DataDependent(f"an assignment to .{func.__self__.__name__} cannot be written down")
        if made or name == "__setitem__":
            self._note(*_target(func, name, args), kwargs, result)
        elif not _is_description(func, name):
            self._refuse_variable(name, given)
        return result

    def reference(self, tensor: Tensor) -> Ref:
        """The entry or input that `tensor` is; else it is one of the model's, or a constant."""
        if tensor in self._known:
            known: Ref = self._known[tensor]
            return known
        if tensor in self._parts:
            ref = self._take_part(*self._parts.pop(tensor))
            self._known[tensor] = ref
            return ref
        if tensor.grad_fn is not None and id(tensor) not in self._state:
            raise DataDependent("a tensor comes from code that cannot be seen, such as a torch.autograd.Function")
        name = self._state.get(id(tensor), f"_constant{len(self.attributes)}")
        self.attributes[name] = tensor
        ref = self._add("get_attr", name, (), {})
        if name.startswith("_constant") or not tensor.requires_grad:
            self._fixed.add(ref.name)
        self._known[tensor] = ref
        return ref

    def _take_part(self, whole: Ref, path: str, call: tuple[str, int] | None) -> Ref:
        ref = self._add("call_function", part, (whole, path), {})
        self.entries[-1] = replace(self.entries[-1], call=call)
        if whole.name in self._fixed:
            self._fixed.add(ref.name)
        return ref

    def _module(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        path = self._paths.get(id(module))
        if self._paused or not path:
            return self._original(module, *args, **kwargs)
        whole = self._task.is_leaf(module, path)
        outer = self._call
        if outer is None and (whole or not any(module.children())):
            self._call = (path, self._calls[path])
            self._calls[path] += 1
        try:
            return self._whole(module, path, args, kwargs) if whole else self._watched(module, path, args, kwargs)
        finally:
            self._call = outer

    def _watched(self, module: nn.Module, path: str, args: Any, kwargs: Any) -> Any:
        self.refuse_foreign_draws()
        outer, self._path = self._path, path
        result = self._original(module, *args, **kwargs)
        self.refuse_foreign_draws()
        self._path = outer
        return result

    def refuse_foreign_draws(self) -> None:
        """Raise ForeignDraw if numpy's or Python's generator moved outside the modules that are left whole."""
        if positions(_FOREIGN) != self._positions:
            raise ForeignDraw(self._path)

    def _whole(self, module: nn.Module, path: str, args: Any, kwargs: Any) -> Any:
        given = self._references((args, kwargs))
        self.refuse_foreign_draws()
        self._paused = True
        try:
            result = self._original(module, *args, **kwargs)
        finally:
            self._paused = False
        self._positions = positions(_FOREIGN)
        self.modules.add(path)
        self._bind(self._add("call_module", path, *given), result)
        return result

    def _function(self, function: Any, args: Any, kwargs: Any) -> Any:
        """A torch.autograd.Function is one call, so that its own backward is kept."""
        apply = self._original_apply.__get__(None, function)
        if self._paused:
            return apply(*args, **kwargs)
        self._paused = True
        try:
            result = apply(*args, **kwargs)
        finally:
            self._paused = False
        self._note("call_function", apply, args, kwargs, result)
        return result

    def _note(self, op: str, target: Any, args: Any, kwargs: Any, result: Any) -> None:
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
        if any(isinstance(inner, Tensor) for inner in take_apart(leaf)[0]):
            raise DataDependent(f"a {type(leaf).__name__} with tensors inside goes into a module that is left whole")
        return leaf

    def _add(self, op: str, target: Any, args: Any, kwargs: Any) -> Ref:
        ref = Ref(f"entry:{len(self.entries)}")
        no_grad = not torch.is_grad_enabled()
        self.entries.append(Entry(ref.name, op, target, args, kwargs, self._call, no_grad))
        return ref

    def _bind(self, ref: Ref, result: Any) -> None:
        """Let the tensors in `result` be known as `ref`, or as parts of it."""
        if isinstance(result, Tensor):
            self._known[result] = ref
            return
        leaves, tree = take_apart(result)
        for leaf, path in reversed(list(zip(leaves, tree.paths(""), strict=True))):
            if isinstance(leaf, Tensor):
                self._known.pop(leaf, None)
                self._parts[leaf] = (ref, path, self._call)

    def _refuse_variable(self, name: str, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if self.reference(tensor).name not in self._fixed:
                raise DataDependent(f"{name.strip('_')}() asks what a tensor holds that depends on the data")


def _state(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _target(func: Any, name: str, args: Any) -> tuple[str, Any, Any]:
    if name == "__get__":
        return "call_function", getattr, (args[0], func.__self__.__name__)
    if is_tensor_method_or_property(func) and args and isinstance(args[0], Tensor):
        return "call_method", name, args
    return "call_function", func, args


_DESCRIPTIONS = {
    "size", "dim", "numel", "stride", "storage_offset", "element_size", "ndimension", "nelement", "get_device",
    "can_cast", "result_type", "promote_types", "__len__", "__hash__", "__repr__", "__format__", "data_ptr",
    "untyped_storage", "has_names", "register_hook", "requires_grad_", "retain_grad",
}  # fmt: skip


def _is_description(func: Any, name: str) -> bool:
    """Whether what is no tensor follows from the shapes and types of the tensors alone."""
    about = name in _DESCRIPTIONS or name in ("__get__", "__set__")
    return about or (name.startswith("is_") and name != "is_nonzero") or name in ("broadcast_shapes", "finfo", "iinfo")


def _draws(target: Any) -> bool:
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return any(
        word in name for word in ("rand", "drop", "bernoulli", "normal", "uniform", "multinomial", "exponential")
    )
