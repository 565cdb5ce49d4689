"""The user's own code, named on the command line as MODULE:FACTORY: found, called, and its errors classified."""

import importlib
import importlib.util
import os
import sys
import traceback
from types import ModuleType
from typing import TYPE_CHECKING, Any

from funcpipe.core.texts import error_text
from funcpipe.errors import InputError

if TYPE_CHECKING:
    from torch import nn


def check_names(names: dict[str, str]) -> None:
    """Raise InputError for what cannot be a factory of the user, by option, before anything is imported; data may be a
    URL.
    """
    for option, text in names.items():
        if option in ("--data", "--validation-data") and "://" in text:
            continue
        module, _, name = text.partition(":")
        if not module or not name:
            raise InputError(f"{option}: {text!r} must read MODULE:FACTORY, such as my_model:make")
        _search_here()
        top = module.partition(".")[0]
        _check_hides_none(option, top)
        if top not in sys.modules and importlib.util.find_spec(top) is None:
            raise InputError(f"{text}: there is no module {top!r} in {os.getcwd()} or among the installed ones")


def load_factory(text: str) -> Any:
    """Return the object `MODULE:NAME`; modules are searched in the current folder first. Raises InputError."""
    module_name, _, name = text.partition(":")
    if not module_name or not name:
        raise InputError(f"{text!r} must read MODULE:FACTORY, such as my_model:make")
    module = _imported(text, module_name)
    try:
        factory = getattr(module, name)
    except AttributeError:
        raise InputError(f"{text}: the module {module_name} has no {name!r}") from None
    if not callable(factory):
        kind = type(factory).__name__
        raise InputError(
            f"{text} is made already (a value of type {kind}), but a function or class that makes it is wanted: write "
            "`def make(...): return ...` and name that"
        )
    return factory


def load_data(text: str) -> Any:
    """The dataset's factory that `MODULE:NAME` names; a URL stays one. Raises InputError."""
    return text if "://" in text else load_factory(text)


def make_model(text: str) -> "nn.Module":
    """The module that the factory returns. Raises InputError if it returns something else, or fails."""
    from torch import nn

    model = made(text, "a function or class that makes the model")
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{text}: the factory must return the model, a torch.nn.Module, but it returned "
            f"{described(model)}; end it with `return model`"
        )
    return model


def make_sample(text: str) -> Any:
    """The inputs that the factory returns. Raises InputError if it returns none, or fails."""
    sample = made(text, "a function that makes one micro-batch of inputs")
    if sample is None or isinstance(sample, str | bytes | int | float) or callable(sample):
        raise InputError(
            f"{text}: the factory must return one micro-batch of inputs, a tensor, a tuple or a dict of tensors, "
            f"but it returned {described(sample)}"
        )
    return sample


def made(text: str, wanted: str) -> Any:
    """Call the factory named `text` without arguments, and return its value; raises InputError if it fails."""
    factory = load_factory(text)
    nn = sys.modules.get("torch.nn")
    if nn is not None and isinstance(factory, nn.Module):
        raise InputError(
            f"{text} is a module that is made already, but {wanted} is wanted: "
            f"write `def make(): return {type(factory).__name__}(…)` and name that"
        )
    try:
        return factory()
    except Exception as error:
        raise InputError(f"{text}: the factory, called without arguments, {_raised(error)}") from error


def described(value: object) -> str:
    """`value` in a message: None, or its kind."""
    return "None" if value is None else f"a {type(value).__name__}"


def _check_hides_none(what: str, name: str) -> None:
    """Raise InputError for a module of the user that has the name of one of Python's."""
    own = [path for path in map(os.path.abspath, (f"{name}.py", name)) if os.path.exists(path)]
    if own and name in sys.stdlib_module_names:
        raise InputError(
            f"{what}: {name} is also a module of Python itself, which torch and others may import: rename {own[0]}"
        )


def _imported(text: str, module_name: str) -> ModuleType:
    _search_here()
    _check_hides_none(text, module_name.partition(".")[0])
    try:
        return importlib.import_module(module_name)
    except ImportError as error:
        raise InputError(f"{text}: the module {module_name} cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:
        raise InputError(f"{text}: the module {module_name} cannot be imported: it {_raised(error)}") from error


def _raised(error: BaseException) -> str:
    """`error` as text, with the line of the user's code."""
    said = f"raised {error_text(error)}".rstrip(": ")
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame for frame in frames if frame.filename not in (__file__, importlib.__file__) and frame.filename[0] != "<"
    ]
    return f"{said} ({own[-1].filename}, line {own[-1].lineno})" if own else said


def _search_here() -> None:
    """Put the current folder on the search path: before installed ones, and after Python's own, which torch needs."""
    here, python = os.getcwd(), os.path.dirname(os.__file__)
    others = [folder for folder in sys.path if folder != here]
    last = max((i for i, folder in enumerate(others) if folder in (python, f"{python}/lib-dynload")), default=-1)
    sys.path[:] = [*others[: last + 1], here, *others[last + 1 :]]
