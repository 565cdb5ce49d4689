"""Routes of tensors between the stages of a plan, and the objects that carry them.

A tensor is sent once, to the stages that use it. Tensors of one stage with the same consumer stages share one object;
so do the gradients that a stage returns to one producer stage.

The gradient of a parameter that several stages hold is summed from the last of these stages to the first, whose
backward ends last, and the sum is sent back to the others. The order of additions is therefore always the same.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from funcpipe.core.profile import TensorProfile, TiedParameter


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationRoute:
    """One object for each micro-batch, written by the stage `producer` and read by each of `consumers`."""

    producer: int
    consumers: tuple[int, ...]
    tensors: tuple[str, ...]
    payload_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientRoute:
    """One object for each micro-batch: the gradients of `tensors`, from a stage that read them to their producer."""

    consumer: int
    producer: int
    tensors: tuple[str, ...]
    payload_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TieRoute:
    """The objects of a step for `parameters`, which all `stages` hold: their gradients, then the sums."""

    stages: tuple[int, ...]
    parameters: tuple[str, ...]
    payload_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """Everything that crosses the cuts of a plan: for one micro-batch and, in `ties`, for one step."""

    activations: tuple[ActivationRoute, ...]
    gradients: tuple[GradientRoute, ...]
    ties: tuple[TieRoute, ...] = ()

    def numbered_activations(self) -> Iterator[tuple[int, ActivationRoute]]:
        """Yield each activation route with its number among those of its producer: the `part` of tasks and of keys.

        (Producer stage, number) names an object in the task graph, in the worker and in storage.
        """
        written: dict[int, int] = defaultdict(int)
        for route in self.activations:
            yield written[route.producer], route
            written[route.producer] += 1


def stages_of_layers(stages: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Return the stage that holds each layer; `stages` are their layers [first, stop), one after the other.

    >>> stages_of_layers([(0, 2), (2, 5)])
    (0, 0, 1, 1, 1)
    """
    return tuple(number for number, (first, stop) in enumerate(stages) for _ in range(first, stop))


def find_routes(
    stage_of_layer: Sequence[int], tensors: Sequence[TensorProfile], ties: Sequence[TiedParameter] = ()
) -> Routes:
    """Return the routes of `tensors` and `ties` when layer i lies in stage `stage_of_layer[i]`."""
    forward: dict[tuple[int, tuple[int, ...]], list[TensorProfile]] = defaultdict(list)
    backward: dict[tuple[int, int], list[TensorProfile]] = defaultdict(list)
    for tensor in tensors:
        producer = stage_of_layer[tensor.producer]
        consumers = tuple(sorted({stage_of_layer[layer] for layer in tensor.consumers} - {producer}))
        if not consumers:
            continue
        forward[producer, consumers].append(tensor)
        if tensor.backward_bytes:
            for consumer in consumers:
                backward[consumer, producer].append(tensor)
    return Routes(
        activations=tuple(
            ActivationRoute(
                producer=producer,
                consumers=consumers,
                tensors=tuple(tensor.name for tensor in group),
                payload_bytes=sum(tensor.forward_bytes for tensor in group),
            )
            for (producer, consumers), group in sorted(forward.items(), key=lambda item: item[0])
        ),
        gradients=tuple(
            GradientRoute(
                consumer=consumer,
                producer=producer,
                tensors=tuple(tensor.name for tensor in group),
                payload_bytes=sum(tensor.backward_bytes for tensor in group),
            )
            for (consumer, producer), group in sorted(backward.items(), key=lambda item: item[0])
        ),
        ties=_tie_routes(stage_of_layer, ties),
    )


def _tie_routes(stage_of_layer: Sequence[int], ties: Sequence[TiedParameter]) -> tuple[TieRoute, ...]:
    """Parameters that are used by the same layers share their objects, wherever the cuts are."""
    found: dict[tuple[int, ...], list[TiedParameter]] = defaultdict(list)
    for tie in ties:
        found[tie.layers].append(tie)
    routes = [
        TieRoute(
            stages=tuple(sorted({stage_of_layer[layer] for layer in layers})),
            parameters=tuple(tie.name for tie in group),
            payload_bytes=sum(tie.parameter_bytes for tie in group),
        )
        for layers, group in sorted(found.items(), key=lambda item: item[0])
    ]
    return tuple(route for route in routes if len(route.stages) > 1)
