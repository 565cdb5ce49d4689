"""Flatten nested values into leaves, and rebuild them.

Tuples, lists, dicts, named tuples, dataclasses and all types registered with torch's pytree are containers; anything
else (tensors, numbers, None, strings, objects) is a leaf.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils import _pytree  # private, but the only registry that users' and packages' types are in


@dataclass(frozen=True)
class Tree:
    """The structure of a nested value: a leaf (`build` is None), or children, named by `keys`, and how to join them."""

    build: Callable[[list[Any]], Any] | None = None
    keys: tuple[str, ...] = ()
    children: tuple["Tree", ...] = ()

    def paths(self, root: str) -> tuple[str, ...]:
        """A dotted path for every leaf: `root`, then the keys that lead to it."""
        if self.build is None:
            return (root,)
        branches = zip(self.keys, self.children, strict=True)
        return tuple(path for key, child in branches for path in child.paths(f"{root}.{key}"))

    def unflatten(self, leaves: Iterator[Any]) -> Any:
        """The nested value with the given leaves, in order."""
        if self.build is None:
            return next(leaves)
        return self.build([child.unflatten(leaves) for child in self.children])


LEAF = Tree()


def flatten(value: Any, *, opaque: Callable[[Any], bool] = lambda value: False) -> tuple[list[Any], Tree]:
    """The leaves of `value`, in order, and the tree that rebuilds it; a value that is `opaque` is a leaf."""
    parts = None if opaque(value) else _children(value)
    if parts is None:
        return [value], LEAF
    build, keys, items = parts
    leaves: list[Any] = []
    children = []
    for item in items:
        below, child = flatten(item, opaque=opaque)
        leaves += below
        children.append(child)
    return leaves, Tree(build, tuple(map(str, keys)), tuple(children))


def tree_map(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with `change` applied to each of its leaves."""
    leaves, tree = flatten(value)
    return tree.unflatten(iter([change(leaf) for leaf in leaves]))


def copied(value: Any) -> Any:
    """`value` with copies of its tensors, which code may write into."""
    return tree_map(value, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)


def _children(value: Any) -> tuple[Callable[[list[Any]], Any], list[Any], list[Any]] | None:
    kind = type(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return partial(_dataclass, kind, tuple(names)), names, [getattr(value, name) for name in names]
    if kind in _pytree.SUPPORTED_NODES:
        items, context = _pytree.SUPPORTED_NODES[kind].flatten_fn(value)
        keys = list(value) if isinstance(value, Mapping) else list(range(len(items)))
        return partial(_registered, kind, context), keys, list(items)
    if isinstance(value, tuple):
        build = partial(_named_tuple, kind) if hasattr(value, "_fields") else kind
        return build, list(getattr(value, "_fields", range(len(value)))), list(value)
    if isinstance(value, list):
        return list, list(range(len(value))), list(value)
    if isinstance(value, dict):
        return partial(_mapping, kind, tuple(value)), list(value), list(value.values())
    return None


def _dataclass(kind: type, names: tuple[str, ...], items: list[Any]) -> Any:
    given = dict(zip(names, items, strict=True))
    made = kind(**{field.name: given[field.name] for field in dataclasses.fields(kind) if field.init})
    for field in dataclasses.fields(kind):
        if not field.init:
            object.__setattr__(made, field.name, given[field.name])
    return made


def _registered(kind: type, context: Any, items: list[Any]) -> Any:
    return _pytree.SUPPORTED_NODES[kind].unflatten_fn(items, context)


def _named_tuple(kind: Any, items: list[Any]) -> Any:
    return kind._make(items)  # as it is: PackedSequence looks at what it is made of, which may be symbolic


def _mapping(kind: type, keys: tuple[Any, ...], items: list[Any]) -> Any:
    return kind(zip(keys, items, strict=True))
