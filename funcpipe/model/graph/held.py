"""Parameters that a layer holds besides those that its code uses, because others of its own follow them.

A stage then holds them too: if they are trained in another stage, as tied parameters that are trained in both.

    layer          uses              follows           holds
    student.0      student.0.weight                    student.0.weight
    teacher.0      teacher.0.weight  student.0.weight  teacher.0.weight  student.0.weight
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from funcpipe.model.graph.values import LayerGraph


def with_followed(graph: LayerGraph, model: nn.Module, followed: Mapping[str, str]) -> LayerGraph:
    """`graph`, which was made of `model`, with each parameter that `followed` names in a layer that holds the one too
    that it follows.

    One that no layer uses is held where the other is; if no layer uses either, by the first layer.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    users: dict[int, list[str]] = defaultdict(list)
    for layer in graph.layers:
        for key in {id(tensor) for tensor in graph.tensors_of(layer).values()}:
            users[key].append(layer.name)
    held: dict[str, dict[str, nn.Parameter]] = defaultdict(dict)
    for name, other in followed.items():
        for holder in users[id(named[name])] or users[id(named[other])] or [graph.layers[0].name]:
            held[holder] |= {name: named[name], other: named[other]}
    return replace(graph, held=dict(held)) if followed else graph
