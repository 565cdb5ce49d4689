"""A module that is made without memory: what its constructor computes is recorded, and computed where it is needed.

The factory runs on torch's meta device, whose tensors have shapes and no contents. Each operator is recorded:

    step 0    aten.empty([4, 4])         -> storage 0        nn.Linear
    step 1    aten.uniform_(storage 0)                       its initialisation
    step 2    aten.arange(16)            -> storage 1
    step 3    aten.sin(storage 1)        -> storage 2        a buffer

`Made` has those steps that a tensor follows from: of the buffer, 2 and 3. Each step that draws random numbers is seeded
by its own number, so that a tensor is the same wherever, and with whichever others, it is computed.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from funcpipe.errors import ModelError
from funcpipe.model.draws import SHARED_GENERATORS, layer_seed, reseed
from funcpipe.model.tensors import flatten


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor within the recorded storage of that number."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def within(self, storages: dict[int, Tensor]) -> Tensor:
        """The tensor, in the storage that was computed."""
        storage = storages[self.storage].untyped_storage()
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class _Step:
    """An operator with its arguments, where a _Place stands for each meta tensor; the places of its results, and the
    storages that it writes into.
    """

    number: int
    operator: Any
    args: Any
    kwargs: Any
    results: tuple[_Place | None, ...]
    written: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that the constructor of a module computes by these `steps`."""

    steps: tuple[_Step, ...]
    place: _Place

    def compute(self, seed: int) -> Tensor:
        """The tensor. Raises ModelError for an operator that has made something else than on the meta device."""
        storages: dict[int, Tensor] = {}

        def real(leaf: Any) -> Any:
            if isinstance(leaf, _Place):
                return leaf.within(storages)
            return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

        with SHARED_GENERATORS.computing(), torch.no_grad():
            for step in self.steps:
                reseed(layer_seed(seed, 0, 0, f"construction {step.number}"))
                found = flatten(step.operator(*_mapped(step.args, real), **_mapped(step.kwargs, real)))[0]
                for place, leaf in zip(step.results, found, strict=True):
                    if place is not None and place.storage not in storages:
                        storages[place.storage] = leaf
                    if place is not None and tuple(leaf.stride()) != place.stride:
                        raise ModelError(f"{step.operator} lays out its result otherwise than on the meta device")
        return self.place.within(storages)


class Construction(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators that a factory calls on the meta device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps: list[_Step] = []
        self._storages: dict[int, int] = {}
        self._alive: list[Tensor] = []  # so that no storage's identity comes twice

    def run(self, factory: Callable[[], nn.Module]) -> nn.Module:
        """The module that `factory` makes, on the meta device. Raises ModelError if it fails there."""
        try:
            with torch.device("meta"), _Python(self), self:
                model = factory()
        except Exception as error:
            raise ModelError(
                f"the function that makes the model fails on the meta device, whose tensors have no contents: {error}; "
                "compute what needs them with plain numbers, or with device='cpu'"
            ) from error
        if not isinstance(model, nn.Module):
            raise ModelError(
                f"the function that makes the model returns a {type(model).__name__}, not a torch.nn.Module"
            )
        return model

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, and record it if it takes or makes a meta tensor."""
        kwargs = kwargs or {}
        given = _mapped(args, self._recorded), _mapped(kwargs, self._recorded)
        result = func(*args, **kwargs)
        leaves = flatten(result)[0]
        if any(_is_meta(leaf) for leaf in (*leaves, *_leaves((args, kwargs)))):
            written = [
                args[i] for i, argument in enumerate(func._schema.arguments[: len(args)]) if _is_written(argument)
            ]
            written += [kwargs[a.name] for a in func._schema.arguments if a.name in kwargs and _is_written(a)]
            numbers = tuple(self._place(t).storage for t in written if isinstance(t, Tensor) and _is_meta(t))
            results = tuple(self._place(leaf) if _is_meta(leaf) else None for leaf in leaves)
            self._steps.append(_Step(len(self._steps), func, *given, results, numbers))
        return result

    def initialise(self, name: str, arguments: dict[str, Any]) -> None:
        """Record a call of a function of torch.nn.init, which writes into its `tensor`."""
        written = (self._place(arguments["tensor"]).storage,)
        given = _mapped(arguments, self._recorded)
        self._steps.append(_Step(len(self._steps), getattr(nn.init, name), (), given, (None,), written))

    def made(self, tensor: Tensor) -> Made | None:
        """How a meta tensor is computed; None if that was not recorded, or leaves it without contents."""
        place = self._place(tensor)
        wanted, steps = {place.storage}, list[_Step]()
        for step in reversed(self._steps):
            makes = {result.storage for result in step.results if result is not None} & wanted
            if not makes and wanted.isdisjoint(step.written):
                continue
            steps.append(step)
            wanted |= {leaf.storage for leaf in _leaves((step.args, step.kwargs)) if isinstance(leaf, _Place)}
        steps.reverse()
        created = {result.storage for step in steps for result in step.results if result is not None}
        empty = {r.storage for s in steps if _is_empty(s) for r in s.results if r is not None}
        written = {number for step in steps for number in step.written}
        if wanted - created or empty - written:
            return None
        return Made(tuple(steps), place)

    def _recorded(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return self._place(leaf) if _is_meta(leaf) else leaf.detach().clone()

    def _place(self, tensor: Tensor) -> _Place:
        identity = tensor.untyped_storage()._cdata
        if identity not in self._storages:
            self._storages[identity] = len(self._storages)
            self._alive.append(tensor.detach())
        where = tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
        return _Place(self._storages[identity], *where, tensor.dtype)


class _Python(TorchFunctionMode):
    """Keeps what Python code would drop on the meta device: the contents of `torch.tensor([…])`, and initialisations
    of torch.nn.init that look into tensors, and so do nothing where `is_meta` says that there is nothing to see.
    """

    def __init__(self, construction: Construction) -> None:
        super().__init__()
        self._construction = construction

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") in (None, "meta", torch.device("meta")):
            return func(*args, **{**kwargs, "device": "cpu"}).to("meta")
        result = func(*args, **kwargs)
        if result is True and getattr(func, "__self__", None) is _IS_META:
            frame = sys._getframe(1)
            if frame.f_globals is vars(nn.init):
                count = frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount
                given = {name: frame.f_locals[name] for name in frame.f_code.co_varnames[:count]}
                self._construction.initialise(frame.f_code.co_name, given)
        return result


_IS_META = vars(torch._C.TensorBase)["is_meta"]


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The arguments of an operator, which are nested in lists, tuples and dicts alone, each changed."""
    if isinstance(value, list | tuple):
        return type(value)(_mapped(item, change) for item in value)
    if isinstance(value, dict):
        return {name: _mapped(item, change) for name, item in value.items()}
    return change(value)


def _leaves(value: Any) -> list[Any]:
    found: list[Any] = []
    _mapped(value, found.append)
    return found


def _is_meta(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_meta


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _is_empty(step: _Step) -> bool:
    return "empty" in str(step.operator)
