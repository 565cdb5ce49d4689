"""The user's own code, named on the command line as MODULE:FACTORY."""

import importlib
import os
import sys
from typing import Any

from funcpipe.errors import InputError


def load_factory(text: str) -> Any:
    """What `MODULE:NAME` names; modules are looked up in the current folder first. Raises InputError."""
    module_name, _, name = text.partition(":")
    if not module_name or not name:
        raise InputError(f"{text!r} must read MODULE:FACTORY, such as my_model:make")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise InputError(f"{text}: the module {module_name} cannot be imported: {error}") from error
    try:
        factory = getattr(module, name)
    except AttributeError:
        raise InputError(f"{text}: the module {module_name} has no {name!r}") from None
    if not callable(factory):
        raise InputError(f"{text} is a {type(factory).__name__}; it must be something that can be called")
    return factory
