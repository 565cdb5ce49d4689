"""Answers of torch's algebra of shapes where all sizes are numbers: the functions of its module that eager code calls.

Every backward with given gradients asks it whether their shapes are right, and every operator on fake tensors whether
anything of it is a symbol.
"""

import operator
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from typing import Any

import torch
from torch.utils._ordered_set import OrderedSet


def _same(value: Any) -> Any:
    return value


def _are_equal(one: Any, other: Any) -> bool:
    return bool(one == other)


def _nothing(value: object) -> Iterator[Any]:
    return iter(())


class Symbol:
    """In place of sympy's kind of all symbols: nothing is one."""


class SymbolOfData(Exception):
    """In place of the exception for code that asks for a symbol which depends on data."""


OF_NUMBERS: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious"), _same),
    **dict.fromkeys(("statically_known_true", "guard_bool", "guard_int"), _same),
    **dict.fromkeys(("guarding_hint_or_throw", "optimization_hint"), _same),
    **dict.fromkeys(("is_symbolic", "is_nested_int", "has_free_unbacked_symbols"), lambda value: False),
    "has_guarding_hint": lambda value: True,
    "free_unbacked_symbols": lambda value: OrderedSet(),
    "_iterate_exprs": _nothing,
    "_iterate_nodes": _nothing,
    "sym_eq": _are_equal,
    "sym_and": lambda *values: reduce(operator.and_, values),
    "sym_or": lambda *values: reduce(operator.or_, values),
}
"""By name, a function for arguments in which everything is a number."""


def are_numbers(value: object) -> bool:
    """Return True if an argument has no symbol in it, nor anything else that the algebra itself must inspect."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_nested:
            return False
        return are_numbers(value.size()) and are_numbers(value.stride()) and are_numbers(value.storage_offset())
    if type(value) in (tuple, list, torch.Size):
        return all(are_numbers(item) for item in value)  # type: ignore[attr-defined]
    return type(value) in (bool, int, float, str, type(None))
