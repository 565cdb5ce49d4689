"""Serialise a stage: its code as a pickle, its tensors apart, loadable where the user's files do not exist."""

import contextlib
import importlib
import io
import operator
import pickle
import pickletools
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import Context, ContextVar
from itertools import compress
from types import ModuleType
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch._library.custom_ops import OPDEFS
from torch.nn.utils import parametrize

from funcpipe.core.texts import error_text
from funcpipe.errors import ModelError
from funcpipe.model.graph.isolation import in_turn
from funcpipe.model.graph.user_code import is_installed, is_standard
from funcpipe.model.split.stage import StageModule


def dump_stage(
    stage: StageModule, extra: Any, *, elsewhere: Collection[str] = (), beside: Sequence[StageModule] = ()
) -> tuple[bytes, dict[str, Tensor]]:
    """`stage` and `extra` as a bundle of code without the contents of tensors, and the tensors by name.

    A tensor that several names or objects refer to is stored once, so that ties survive. Of those whose names are in
    `elsewhere` the bundle has shape and dtype alone; modules `beside` the stage, in the extra, may have some too. The
    bundle includes the user's own Python modules. Raises ModelError if something cannot be pickled.
    """
    try:
        names = {id(tensor): name for part in (*beside, stage) for name, tensor in _named_tensors(part)}
        return _dump((stage, extra), names, elsewhere)
    except Exception as error:
        raise ModelError(
            f"the stage cannot be sent to another process: {error_text(error)}; "
            "create that object inside a function instead of keeping it on the model, the loss or the data set"
        ) from error


def dump_value(value: Any) -> tuple[bytes, dict[str, Tensor]]:
    """`value` as a bundle without the contents of its tensors, and these by name. Raises what pickling raises."""
    return _dump(value, {})


def load_value(bundle: bytes, tensors: Mapping[str, Tensor], *, made: dict[str, Tensor] | None = None) -> Any:
    """The value that `dump_value` wrote. Runs code from `bundle`: check its digest first.

    Its tensors are put into `made`, by name.
    """
    with in_turn():  # torch.fx traces the modules of a graph anew
        return _Unpickler(io.BytesIO(bundle), tensors, {} if made is None else made).load()


def _dump(value: Any, names: Mapping[int, str], elsewhere: Collection[str] = ()) -> tuple[bytes, dict[str, Tensor]]:
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, names, elsewhere)
    with in_turn(), _user_modules_by_value():
        pickler.dump(value)
    return buffer.getvalue(), pickler.tensors


def load_stage(
    bundle: bytes, tensors: Mapping[str, Tensor], *, made: dict[str, Tensor] | None = None
) -> tuple[StageModule, Any]:
    """The stage and the extra that `dump_stage` wrote, holding `tensors`; those that are elsewhere are uninitialised.
    All of them are put into `made`, by name. Runs code from `bundle`: check its digest first.
    """
    stage, extra = load_value(bundle, tensors, made=made)
    stage.train()
    return stage, extra


def imported_modules(bundle: bytes) -> frozenset[str]:
    """The installed modules, besides torch and funcpipe, that loading `bundle` imports."""
    words = {argument for _, argument, _ in pickletools.genops(bundle) if isinstance(argument, str)}
    modules = {name: sys.modules[name] for name in words & sys.modules.keys()}
    return frozenset(
        name
        for name, module in modules.items()
        if (file := getattr(module, "__file__", None)) is not None
        and is_installed(file)
        and not is_standard(file)
        and name.partition(".")[0] not in (*_INSTALLED, "cloudpickle")
    )


def _named_tensors(stage: StageModule) -> Iterator[tuple[str, Tensor]]:
    """All tensors of `stage` by name; of tied names, the first one in the state_dict comes last, and so wins."""
    named = [*stage.named_parameters(remove_duplicate=False), *stage.named_buffers(remove_duplicate=False)]
    return reversed(named)


CONSTANT = "constant:"
"""The beginning of the names of tensors that are neither parameters nor buffers of the stage."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles a reference in place of every tensor, and keeps the tensor in `tensors` unless it is `elsewhere`."""

    def __init__(self, file: io.BytesIO, names: Mapping[int, str], elsewhere: Collection[str]) -> None:
        super().__init__(file)
        self.names = names
        self.elsewhere = elsewhere
        self.tensors: dict[str, Tensor] = {}
        self.references: dict[int, tuple[Any, ...]] = {}
        self.seen: list[Tensor] = []

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        """The reference to `obj` if it is a tensor: its name, whether it is a parameter and trainable, its strides, and
        shape and dtype if it is elsewhere.
        """
        if not isinstance(obj, Tensor):
            return None
        if id(obj) not in self.references:
            self.seen.append(obj)
            name = self.names.get(id(obj), f"{CONSTANT}{len(self.references)}")
            form: tuple[Any, ...] = ()
            if name in self.elsewhere:
                form = tuple(obj.shape), obj.dtype
            else:
                self.tensors[name] = obj.detach()
            trainable = obj.requires_grad and obj.is_leaf
            self.references[id(obj)] = (name, isinstance(obj, nn.Parameter), trainable, tuple(obj.stride()), *form)
        return self.references[id(obj)]

    def reducer_override(self, obj: Any) -> Any:
        """Pickle operators of torch and context variables by name, and parametrized modules by their parts."""
        if isinstance(obj, ContextVar):
            return _context_variable, (obj.name, _defining_module(obj), _default(obj))
        if isinstance(obj, torch._ops.OpOverloadPacket):
            return _operator, (obj._qualified_op_name, _operator_module(obj._qualified_op_name))
        if isinstance(obj, torch._ops.OpOverload):
            return getattr, (obj.overloadpacket, obj._overloadname)
        if isinstance(obj, nn.Module) and parametrize.is_parametrized(obj):
            original = type(obj).__bases__[0]
            return original.__new__, (original,), vars(obj), None, None, _parametrise
        return super().reducer_override(obj)


class _Unpickler(pickle.Unpickler):
    """Replaces the references in a pickle by tensors."""

    def __init__(self, file: io.BytesIO, tensors: Mapping[str, Tensor], made: dict[str, Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors
        self.made = made

    def persistent_load(self, pid: tuple[Any, ...]) -> Tensor:
        """The tensor that `pid` refers to, always the same object."""
        name, is_parameter, trainable, stride, *form = pid
        if name not in self.made:
            tensor = torch.empty(form[0], dtype=form[1]) if form else self.tensors[name].detach()
            if not form and tuple(tensor.stride()) != stride and 0 not in stride:
                tensor = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)
            self.made[name] = nn.Parameter(tensor, trainable) if is_parameter else tensor.requires_grad_(trainable)
        return self.made[name]


def _defining_module(variable: ContextVar[Any]) -> tuple[str, str] | tuple[()]:
    """The installed module that defines `variable`, and its name there: hooks of packages refer to such variables."""
    for module_name, module in list(sys.modules.items()):
        for name, item in vars(module).items() if isinstance(module, ModuleType) else ():
            if item is variable and not _is_user_module(module):
                return module_name, name
    return ()


def _default(variable: ContextVar[Any]) -> dict[str, Any]:
    try:
        return {"default": Context().run(variable.get)}
    except LookupError:
        return {}


def _context_variable(label: str, place: tuple[str, str] | tuple[()], default: Mapping[str, Any]) -> Any:
    if not place:
        return ContextVar(label, **default)
    return getattr(importlib.import_module(place[0]), place[1])


def _parametrise(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Redo to a module, once it has its `state`, what `torch.nn.utils.parametrize` did: torch does not pickle it."""
    vars(module).update(state)
    parametrize._inject_new_class(module)
    parametrizations = module.parametrizations
    assert isinstance(parametrizations, nn.ModuleDict)
    for name in parametrizations:
        parametrize._inject_property(module, name)


def _operator_module(name: str) -> str | None:
    """The module whose import registers the operator `name` with torch; None for torch's own operators."""
    home = getattr(getattr(OPDEFS.get(name), "_init_fn", None), "__module__", None)
    if home is None or home.partition(".")[0] == "torch":
        return None
    if home in sys.modules and _is_user_module(sys.modules[home]):
        raise ModelError(f"the operator {name} is defined in {home}, which functions do not have: make it a package")
    return str(home)


def _operator(name: str, home: str | None) -> Any:
    if home is not None:
        importlib.import_module(home)
    namespace, _, operator = name.partition("::")
    return getattr(getattr(torch.ops, namespace), operator)


@contextlib.contextmanager
def _user_modules_by_value() -> Iterator[None]:
    """Have cloudpickle pickle the modules that the user wrote by value."""
    known = cloudpickle.list_registry_pickle_by_value()
    loaded = dict(sys.modules)
    unknown = compress(loaded, map(operator.is_not, loaded.values(), map(_installed.get, loaded)))  # of thousands
    users = {loaded[name].__name__: loaded[name] for name in unknown if _is_users(name, loaded[name])}
    added = {name: module for name, module in users.items() if name not in known}
    for module in added.values():
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in added.values():
            cloudpickle.unregister_pickle_by_value(module)


def _is_users(name: str, module: ModuleType) -> bool:
    """Return `_is_user_module`; modules that are found installed become known, and are not asked again."""
    if not isinstance(module, ModuleType):
        return False
    if _is_user_module(module):
        return True
    if vars(module).get("__file__") is not None:
        _installed[name] = module
    return False


_installed: dict[str, ModuleType] = {}
_INSTALLED = ("funcpipe", "torch", "numpy")


def _is_user_module(module: ModuleType) -> bool:
    """Return whether `module` comes from a file that other machines may not have."""
    name, file = getattr(module, "__name__", ""), vars(module).get("__file__")  # if asked, pyomo's load pandas
    if file is None or name.partition(".")[0] in _INSTALLED or sys.modules.get(name) is not module:
        return False
    return not is_installed(file)
