"""A callable reaches objects by paths: attributes, enclosed variables, globals, containers, bound methods."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from funcpipe.model.graph.reachable import globals_named, reached_of, reached_values

NET = nn.Linear(2, 2)
OTHER = nn.Linear(2, 2)


def by_global(output: Any, target: Any) -> Any:
    return output.OTHER + NET.weight.norm()  # an attribute named as a global is none


def by_helper(output: Any, target: Any) -> Any:
    return by_global(output, target)


def enclosed() -> Callable[[Any, Any], Any]:
    net = NET
    return lambda output, target: output + net.weight.norm()


class Penalty(nn.Module):
    def __init__(self, parameters: list[torch.Tensor]) -> None:
        super().__init__()
        self.watched = {"all": parameters}

    def forward(self, output: Any, target: Any) -> Any:
        return output + sum(parameter.norm() for parameter in self.watched["all"])


class ByGlobal(nn.Module):
    def forward(self, output: Any, target: Any) -> Any:
        return by_global(output, target)


@dataclass(slots=True)
class Held:
    net: nn.Module

    def loss(self, output: Any, target: Any) -> Any:
        return output


def takes(output: Any, target: Any, net: nn.Module | None = None, *, other: Any = None) -> Any:
    return output


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: by_global, "NET.weight"),
        (lambda: by_helper, "by_global.NET.weight"),
        (enclosed, "net.weight"),
        (lambda: Penalty([NET.weight]), "watched.all.0"),
        (lambda: Penalty([NET.weight.data.view(-1)]), "watched.all.0"),
        (ByGlobal, "forward.by_global.NET.weight"),
        (lambda: Held(NET).loss, "__self__.net.weight"),
        (lambda: partial(takes, net=NET), "net.weight"),
        (lambda: partial(takes, other=[NET]), "other.0.weight"),
        (lambda: NET.forward, "__self__.weight"),
    ],
)
def test_a_parameter_is_found_by_its_path(make: Callable[[], Any], path: str) -> None:
    wanted = [("head.weight", NET.weight), ("other.weight", OTHER.weight)]
    assert reached_of(make(), wanted) == {"head.weight": path}


def test_a_module_is_found_and_each_object_once() -> None:
    shared = nn.Linear(2, 2)
    pair = nn.ModuleList([shared, shared])
    assert reached_of(pair, [("x", shared)]) == {"x": "0"}
    found = [value for _, value in reached_values(pair)]
    assert len(found) == len({id(value) for value in found})


def test_what_holds_itself_ends() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert [path for path, _ in reached_values(loop)] == [""]


def test_globals_of_inner_functions_are_named() -> None:
    def outer() -> Callable[[], Any]:
        return lambda: NET

    assert globals_named(outer.__code__) == ("NET",)
