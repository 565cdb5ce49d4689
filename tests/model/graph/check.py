"""The one question about a traced model: do its stages, for any cuts, do what the plain module does?"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.model.graph import LayerGraph, trace
from funcpipe.model.split import split
from funcpipe.model.tensors import flatten
from funcpipe.training.plain_loop import seeded
from tests.model.split.chain import assert_same, even_bounds, run_chain, take_gradients

SEED = (5, 2, 9)


def total(output: Any) -> Tensor:
    """A number that every floating tensor of `output` has its part in."""
    leaves = [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return torch.stack([(leaf * torch.linspace(-1, 1, leaf.numel()).view(leaf.shape)).sum() for leaf in leaves]).sum()


def check(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] = {},
    *,
    loss: Callable[[Any], Tensor] = total,
    shorter: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None,
    blocks: Sequence[str] = (),
    others: Sequence[Tensor] = (),
) -> LayerGraph:
    """Trace `model` and compare it, in one stage, in two with every cut, and in three, with itself; returns the
    graph.

    Outputs must be the same to the bit, gradients but for the order of additions. `shorter` is a call with fewer
    samples, `others` are further inputs for models that take one.
    """
    plain = copy.deepcopy(model)
    graph = trace(model, args, kwargs, blocks=blocks)
    for call in [(args, kwargs), *([shorter] if shorter else []), *(((x,), {}) for x in others)]:
        compare_with_model(plain, model, graph, call, loss)
    return graph


def compare_with_model(
    plain: nn.Module, model: nn.Module, graph: LayerGraph, call: "Call", loss: Callable[[Any], Tensor] = total
) -> None:
    """Compare the stages of `graph`, which was traced from `model`, with a `plain` copy of it."""
    count = len(graph.layers)
    plans = [[(0, count)], *([(0, cut), (cut, count)] for cut in range(1, count))]
    if count > 3:
        plans.append(even_bounds(count, 3))
    expected = _plainly(plain, graph, call, loss)
    for bounds in plans:
        _compare(model, graph, bounds, call, loss, expected)


Call = tuple[tuple[Any, ...], Mapping[str, Any]]
Results = tuple[Any, Mapping[str, Tensor | None], Mapping[str, Tensor]]


def _plainly(model: nn.Module, graph: LayerGraph, call: Call, loss: Callable[[Any], Tensor]) -> Results:
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    args, kwargs = copy.deepcopy(call)
    drawing = seeded(model, graph, *SEED)
    with drawing:
        output = model(*args, **kwargs)
    number = loss(output)
    if number.requires_grad:
        with drawing:
            torch.autograd.backward(number)
    after = {name: buffer.clone() for name, buffer in model.named_buffers()}
    _restore(model, buffers)
    return output, take_gradients(model), after


def _compare(
    model: nn.Module,
    graph: LayerGraph,
    bounds: Sequence[tuple[int, int]],
    call: Call,
    loss: Callable[[Any], Tensor],
    expected: Results,
) -> None:
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    stages = split(graph, bounds)
    output = run_chain(stages, graph.signature.bind(*call), loss, SEED)
    after = {name: buffer.clone() for name, buffer in model.named_buffers()}
    _restore(model, buffers)
    found, tree = flatten(output)
    wanted, plain_tree = flatten(expected[0])
    assert tree.paths("") == plain_tree.paths("")
    assert type(output) is type(expected[0])
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other) if isinstance(other, Tensor) else one == other, bounds
    assert_same(take_gradients(model), expected[1], 2e-6)
    assert_same(after, expected[2])


def _restore(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
